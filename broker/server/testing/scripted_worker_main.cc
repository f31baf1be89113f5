// A ScriptedWorker in a process of its own: one command a line on descriptor 3, one answer a line
// on descriptor 4 ("ok VALUE" or "error CODE MESSAGE"). See worker_process.h.
#include <unistd.h>

#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "broker/server/testing/scripted_worker.h"

namespace palimpsest {
namespace {

using Words = std::vector<std::string>;
constexpr absl::Duration kPatience = absl::Seconds(20);

uint32_t Number(const std::string& word) {
  uint32_t number = 0;
  return absl::SimpleAtoi(word, &number) ? number : 0;
}

v1::SlabRole Role(const std::string& word) {
  if (word == "slot") return v1::SLAB_ROLE_SLOT;
  return word == "kv" ? v1::SLAB_ROLE_KV : v1::SLAB_ROLE_PARAMETER;
}

ScriptedWorker::Hold HoldOf(const std::string& word) {
  using Hold = ScriptedWorker::Hold;
  if (word == "revoke") return Hold::kRevoke;
  if (word == "revoked-part") return Hold::kRevokedPart;
  if (word == "revoked") return Hold::kRevoked;
  if (word == "grant") return Hold::kGrant;
  if (word == "mapped") return Hold::kMapped;
  if (word == "rotation") return Hold::kRotation;
  return word == "rotated" ? Hold::kRotated : Hold::kNowhere;
}

absl::StatusOr<std::string> Text(const absl::Status& status) {
  if (!status.ok()) return status;
  return "";
}

// What only hostile workers do; nullopt for any other command.
std::optional<absl::StatusOr<std::string>> Misbehave(ScriptedWorker& worker, const Words& words) {
  const std::string& command = words[0];
  const auto word = [&words](size_t i) { return i < words.size() ? words[i] : std::string(); };
  if (command == "claim") return Text(worker.Claim(word(1)));
  if (command == "return-slab") {
    const bool forged = word(3) == "forged";
    uint64_t epoch = 0;
    if (!absl::SimpleAtoi(word(2), &epoch)) return absl::InvalidArgumentError(word(2));
    return Text(worker.ReturnSlab(
        Number(word(1)), epoch, forged ? std::nullopt : std::optional<uint32_t>(Number(word(3)))));
  }
  if (command == "return-image") return Text(worker.ReturnImage(word(1) == "forged"));
  if (command == "epoch") return absl::StrCat(worker.EpochOf(Number(word(1))));
  if (command == "flood") return Text(worker.Flood(Number(word(1))));
  if (command == "silent-calls") return worker.OpenSilentCalls(word(1), Number(word(2))), "";
  if (command == "become") {
    if (setresuid(Number(word(1)), Number(word(1)), Number(word(1))) != 0) {
      return absl::PermissionDeniedError("setresuid");
    }
    return "";
  }
  if (command == "reads") return worker.set_reads(word(1) == "yes"), "";
  if (command == "hangs-up") return worker.set_hangs_up(word(1) == "yes"), "";
  return std::nullopt;
}

absl::StatusOr<std::string> Obey(ScriptedWorker& worker, const Words& words) {
  const std::string& command = words[0];
  const auto word = [&words](size_t i) { return i < words.size() ? words[i] : std::string(); };
  if (command == "hello") return Text(worker.Hello(word(1), word(2), word(3)));
  if (command == "attach") return Text(worker.Attach(word(1)));
  if (command == "reattach") return Text(worker.Reattach(word(1)));
  if (command == "drop") return worker.Drop(), "";
  if (command == "activate") return Text(worker.Activate());
  if (command == "kv") return Text(worker.SetKvTarget(Number(word(1)), Number(word(2))));
  if (command == "report") return Text(worker.Report(word(1) == "active", word(2) == "unused"));
  if (command == "manners") {
    worker.set_manners(word(1) == "silent" ? ScriptedWorker::Manners::kSilent
                       : word(1) == "liar" ? ScriptedWorker::Manners::kLiar
                                           : ScriptedWorker::Manners::kHonest);
    return "";
  }
  if (command == "hold") return worker.HoldAt(HoldOf(word(1))), "";
  if (command == "go-on") return Text(worker.GoOn());
  if (command == "held") return absl::StrCat(worker.held());
  if (command == "rotates") return worker.set_rotates(word(1) == "yes"), "";
  if (command == "await-freed") {
    return Text(worker.AwaitFreed(static_cast<int>(Number(word(1))), kPatience));
  }
  if (command == "maps") return worker.set_maps(word(1) == "yes"), "";
  if (command == "token") return absl::BytesToHexString(worker.last_token());
  if (command == "fetch") return Text(worker.Fetch(absl::HexStringToBytes(word(1))));
  if (command == "await-slabs") {
    return Text(worker.AwaitSlabs(Role(word(1)), Number(word(2)), kPatience));
  }
  if (command == "await-grants") return Text(worker.AwaitGrants(Number(word(1)), kPatience));
  if (command == "await-revokes") return Text(worker.AwaitRevokes(Number(word(1)), kPatience));
  if (command == "await-refused") return Text(worker.AwaitRefused(kPatience));
  if (command == "await-pressure") return Text(worker.AwaitPressure(1, kPatience));
  if (command == "await-lost") {
    const auto lost = worker.AwaitLost(kPatience);
    if (!lost.ok()) return lost.status();
    return std::string(lost->message());
  }
  if (command == "session") return absl::StrCat(worker.session());
  if (command == "slabs") return absl::StrJoin(worker.Slabs(Role(word(1))), ",");
  if (command == "fill") return worker.Fill(Number(word(1))), "";
  if (command == "mark") return worker.Mark(static_cast<int>(Number(word(1)))), "";
  if (command == "check") return Text(worker.CheckMarks());
  if (command == "write") return Text(worker.Write(Number(word(1)), Number(word(2))));
  if (command == "read") {
    const absl::StatusOr<int> value = worker.Read(Number(word(1)));
    if (!value.ok()) return value.status();
    return absl::StrCat(*value);
  }
  return Misbehave(worker, words).value_or(absl::UnimplementedError(command));
}

}  // namespace
}  // namespace palimpsest

int main() {
  palimpsest::ScriptedWorker worker;
  FILE* const commands = fdopen(3, "r");
  FILE* const answers = fdopen(4, "w");
  char line[4096];
  while (commands != nullptr && answers != nullptr && fgets(line, sizeof line, commands)) {
    std::string text(line);
    if (!text.empty() && text.back() == '\n') text.pop_back();
    const auto answer = palimpsest::Obey(worker, absl::StrSplit(text, ' '));
    const std::string out =
        answer.ok() ? absl::StrCat("ok ", *answer, "\n")
                    : absl::StrCat("error ", absl::StatusCodeToString(answer.status().code()), " ",
                                   answer.status().message(), "\n");
    fputs(out.c_str(), answers);
    fflush(answers);
  }
  // Without destructors: a test that is done with its worker wants it gone.
  _exit(0);
}
