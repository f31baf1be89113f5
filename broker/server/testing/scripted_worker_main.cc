// A ScriptedWorker in a process of its own (common/testing/command_loop.h).
#include <unistd.h>

#include <optional>
#include <string>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "broker/server/testing/scripted_worker.h"
#include "common/testing/command_loop.h"

namespace palimpsest {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(20);

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

// What only hostile workers do; nullopt for any other command.
std::optional<CommandAnswer> Misbehave(ScriptedWorker& worker, const Command& command) {
  const std::string& name = command.name();
  const auto number = [&command](size_t i) { return static_cast<uint32_t>(command.number(i)); };
  if (name == "claim") return AnswerOf(worker.Claim(command.word(1)));
  if (name == "return-slab") {
    const bool forged = command.word(3) == "forged";
    return AnswerOf(worker.ReturnSlab(number(1), command.number(2),
                                      forged ? std::nullopt : std::optional<uint32_t>(number(3))));
  }
  if (name == "return-image") return AnswerOf(worker.ReturnImage(command.word(1) == "forged"));
  if (name == "epoch") return absl::StrCat(worker.EpochOf(number(1)));
  if (name == "flood") return AnswerOf(worker.Flood(number(1)));
  if (name == "silent-calls") return worker.OpenSilentCalls(command.word(1), number(2)), "";
  if (name == "become") {
    if (setresuid(number(1), number(1), number(1)) != 0) {
      return absl::PermissionDeniedError("setresuid");
    }
    return "";
  }
  if (name == "reads") return worker.set_reads(command.word(1) == "yes"), "";
  if (name == "hangs-up") return worker.set_hangs_up(command.word(1) == "yes"), "";
  return std::nullopt;
}

CommandAnswer Obey(ScriptedWorker& worker, const Command& command) {
  const std::string& name = command.name();
  const auto word = [&command](size_t i) { return command.word(i); };
  const auto number = [&command](size_t i) { return static_cast<uint32_t>(command.number(i)); };
  if (name == "hello") return AnswerOf(worker.Hello(word(1), word(2), word(3)));
  if (name == "attach") return AnswerOf(worker.Attach(word(1)));
  if (name == "reattach") return AnswerOf(worker.Reattach(word(1)));
  if (name == "drop") return worker.Drop(), "";
  if (name == "activate") return AnswerOf(worker.Activate());
  if (name == "kv") return AnswerOf(worker.SetKvTarget(number(1), number(2)));
  if (name == "report") return AnswerOf(worker.Report(word(1) == "active", word(2) == "unused"));
  if (name == "manners") {
    worker.set_manners(word(1) == "silent" ? ScriptedWorker::Manners::kSilent
                       : word(1) == "liar" ? ScriptedWorker::Manners::kLiar
                                           : ScriptedWorker::Manners::kHonest);
    return "";
  }
  if (name == "hold") return worker.HoldAt(HoldOf(word(1))), "";
  if (name == "go-on") return AnswerOf(worker.GoOn());
  if (name == "held") return absl::StrCat(worker.held());
  if (name == "rotates") return worker.set_rotates(word(1) == "yes"), "";
  if (name == "await-freed") {
    return AnswerOf(worker.AwaitFreed(static_cast<int>(number(1)), kPatience));
  }
  if (name == "maps") return worker.set_maps(word(1) == "yes"), "";
  if (name == "token") return absl::BytesToHexString(worker.last_token());
  if (name == "fetch") return AnswerOf(worker.Fetch(absl::HexStringToBytes(word(1))));
  if (name == "await-slabs") {
    return AnswerOf(worker.AwaitSlabs(Role(word(1)), number(2), kPatience));
  }
  if (name == "await-grants") return AnswerOf(worker.AwaitGrants(number(1), kPatience));
  if (name == "await-revokes") return AnswerOf(worker.AwaitRevokes(number(1), kPatience));
  if (name == "await-refused") return AnswerOf(worker.AwaitRefused(kPatience));
  if (name == "await-pressure") return AnswerOf(worker.AwaitPressure(1, kPatience));
  if (name == "await-lost") {
    const auto lost = worker.AwaitLost(kPatience);
    if (!lost.ok()) return lost.status();
    return std::string(lost->message());
  }
  if (name == "session") return absl::StrCat(worker.session());
  if (name == "slabs") return absl::StrJoin(worker.Slabs(Role(word(1))), ",");
  if (name == "fill") return worker.Fill(static_cast<int>(number(1))), "";
  if (name == "mark") return worker.Mark(static_cast<int>(number(1))), "";
  if (name == "check") return AnswerOf(worker.CheckMarks());
  if (name == "write") return AnswerOf(worker.Write(number(1), static_cast<int>(number(2))));
  if (name == "read") return AnswerOf(worker.Read(number(1)));
  return Misbehave(worker, command).value_or(absl::UnimplementedError(name));
}

}  // namespace
}  // namespace palimpsest

int main() {
  palimpsest::ScriptedWorker worker;
  palimpsest::ObeyCommands(
      [&worker](const palimpsest::Command& command) { return palimpsest::Obey(worker, command); });
  // Without destructors: a test that is done with its worker wants it gone.
  _exit(0);
}
