#include "broker/server/journal.h"

#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <fstream>
#include <random>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using journal::Record;
using ::testing::HasSubstr;

Record Opened(uint64_t session) {
  Record record;
  auto& opened = *record.mutable_session_opened();
  opened.set_session_id(session);
  opened.set_tenant("alpha");
  opened.set_pid(4711);
  opened.set_process_start(99);
  return record;
}

Record Ended(uint64_t session) {
  Record record;
  record.mutable_session_ended()->set_session_id(session);
  return record;
}

Record Granted(uint32_t slab, uint64_t session, uint64_t epoch) {
  Record record;
  auto& granted = *record.mutable_slab_granted();
  granted.set_slab_id(slab);
  granted.set_session_id(session);
  granted.set_epoch(epoch);
  granted.set_inode(1000 + slab);
  granted.set_role(2);
  return record;
}

Record Released(uint32_t slab, uint64_t epoch) {
  Record record;
  record.mutable_slab_released()->set_slab_id(slab);
  record.mutable_slab_released()->set_epoch(epoch);
  return record;
}

Record Generation(uint32_t generation) {
  Record record;
  record.mutable_generation()->set_generation(generation);
  return record;
}

std::string Describe(const JournalState& state) {
  std::string text;
  for (const Record& record : state.Snapshot()) text += record.ShortDebugString() + "\n";
  return text;
}

// A legal history of `length` records, the state after each prefix, and the file length after each.
struct History {
  std::string file{kJournalMagic};
  std::vector<std::string> states{""};
  std::vector<size_t> ends{kJournalMagic.size()};
};

History RandomHistory(std::mt19937& random, int length) {
  History history;
  JournalState state;
  uint64_t next_session = 1;
  uint64_t epoch = 1;
  for (int i = 0; i < length; ++i) {
    Record record;
    const int kind = i == 0 ? 0 : static_cast<int>(random() % 8);
    if (kind == 0) {
      record = Generation(state.generation.generation() + 1);
    } else if (kind == 1 || state.sessions.empty()) {
      record = Opened(next_session++);
    } else if (kind == 2) {
      record = Ended(state.sessions.begin()->first.value());
    } else if (kind == 3) {
      record.mutable_image()->set_fingerprint(std::string(32, static_cast<char>(random() % 3)));
      record.mutable_image()->set_manifest(std::string(random() % 300, 'm'));
    } else if (kind == 4) {
      record = Released(random() % 8, epoch);
    } else {
      record = Granted(random() % 8, state.sessions.rbegin()->first.value(), ++epoch);
    }
    EXPECT_TRUE(state.Apply(record).ok());
    AppendJournalFrame(record, i, history.file);
    history.states.push_back(Describe(state));
    history.ends.push_back(history.file.size());
  }
  return history;
}

TEST(JournalReplay, TruncationAtEveryByteGivesTheStateOfTheIntactPrefix) {
  std::mt19937 random(7);
  const History history = RandomHistory(random, 60);
  size_t frames = 0;
  for (size_t length = 0; length <= history.file.size(); ++length) {
    while (frames + 1 < history.ends.size() && history.ends[frames + 1] <= length) ++frames;
    const JournalReplay replay = ReplayJournal(absl::string_view(history.file).substr(0, length));
    ASSERT_TRUE(replay.damage.ok()) << length << ": " << replay.damage;
    EXPECT_EQ(Describe(replay.state), history.states[frames]) << length;
    EXPECT_EQ(replay.frames, frames);
    EXPECT_EQ(replay.valid_bytes + replay.dropped_bytes, length);
  }
}

TEST(JournalReplay, CorruptionIsNeverReadAsAnotherState) {
  std::mt19937 random(11);
  for (int round = 0; round < 400; ++round) {
    const History history = RandomHistory(random, 20);
    std::string file = history.file;
    const size_t at = random() % file.size();
    file[at] = static_cast<char>(file[at] ^ (1 + random() % 255));
    const JournalReplay replay = ReplayJournal(file);
    const size_t hit =
        std::upper_bound(history.ends.begin(), history.ends.end(), at) - history.ends.begin();
    EXPECT_EQ(Describe(replay.state), hit == 0 ? "" : history.states[hit - 1]);
    ASSERT_EQ(replay.damage.ok(), hit == history.ends.size() - 1)
        << "round " << round << " byte " << at;
  }
}

TEST(JournalReplay, AFrameMovedToAnotherPlaceIsCorruption) {
  std::string file(kJournalMagic);
  AppendJournalFrame(Generation(1), 0, file);
  AppendJournalFrame(Opened(1), 2, file);
  EXPECT_EQ(ReplayJournal(file).damage.code(), absl::StatusCode::kDataLoss);
}

TEST(JournalReplay, RandomBytesAreRefusedOrEmpty) {
  std::mt19937 random(3);
  for (int round = 0; round < 2000; ++round) {
    std::string file = round % 2 == 0 ? std::string(kJournalMagic) : "";
    const size_t length = random() % 200;
    for (size_t i = 0; i < length; ++i) file.push_back(static_cast<char>(random()));
    EXPECT_EQ(ReplayJournal(file).frames, 0);
  }
}

TEST(JournalState, SnapshotIsTheInverseOfReplay) {
  std::mt19937 random(5);
  for (int round = 0; round < 50; ++round) {
    const History history = RandomHistory(random, 100);
    const JournalState state = ReplayJournal(history.file).state;
    JournalState rebuilt;
    for (const Record& record : state.Snapshot()) ASSERT_TRUE(rebuilt.Apply(record).ok());
    EXPECT_EQ(Describe(rebuilt), history.states.back());
  }
}

TEST(JournalState, RefusesWhatNoBrokerWrites) {
  JournalState state;
  EXPECT_FALSE(state.Apply(Record()).ok());
  EXPECT_FALSE(state.Apply(Granted(1, 1, 1)).ok());
  EXPECT_FALSE(state.Apply(Ended(1)).ok());
  ASSERT_TRUE(state.Apply(Opened(1)).ok());
  EXPECT_FALSE(state.Apply(Opened(1)).ok());
  ASSERT_TRUE(state.Apply(Generation(2)).ok());
  EXPECT_FALSE(state.Apply(Generation(2)).ok());
}

TEST(JournalState, AReleaseOfAnOlderGrantChangesNothing) {
  JournalState state;
  ASSERT_TRUE(state.Apply(Opened(1)).ok());
  ASSERT_TRUE(state.Apply(Granted(3, 1, 8)).ok());
  ASSERT_TRUE(state.Apply(Released(3, 7)).ok());
  EXPECT_EQ(state.slabs.size(), 1);
  ASSERT_TRUE(state.Apply(Released(3, 8)).ok());
  EXPECT_EQ(state.slabs.size(), 0);
}

class JournalTest : public ::testing::Test {
 protected:
  JournalTest() {
    std::string pattern = ::testing::TempDir() + "journalXXXXXX";
    root_ = mkdtemp(pattern.data());
    options_.directory = root_ + "/state";
    options_.boot_id = "boot-1";
    options_.slab_bytes = MiB(2);
    options_.pool_slabs = 8;
  }
  ~JournalTest() override {
    for (const char* name : {"journal", "journal.new", "lock"}) {
      unlink((options_.directory + "/" + name).c_str());
    }
    rmdir(options_.directory.c_str());
    rmdir(root_.c_str());
  }
  std::string path() const { return options_.directory + "/journal"; }
  std::string Content() const {
    std::stringstream out;
    out << std::ifstream(path(), std::ios::binary).rdbuf();
    return out.str();
  }

  std::string root_;
  Journal::Options options_;
};

TEST_F(JournalTest, TheNextGenerationFindsWhatWasAppended) {
  {
    auto journal = Journal::Open(options_);
    ASSERT_TRUE(journal.ok()) << journal.status();
    EXPECT_EQ((*journal)->generation(), 1);
    EXPECT_TRUE((*journal)->recovered().sessions.empty());
    ASSERT_TRUE((*journal)->Append({Opened(1), Granted(3, 1, 5), Granted(4, 1, 6)}).ok());
    ASSERT_TRUE((*journal)->Append({Released(4, 6)}).ok());
  }
  auto journal = Journal::Open(options_);
  ASSERT_TRUE(journal.ok()) << journal.status();
  EXPECT_EQ((*journal)->generation(), 2);
  EXPECT_EQ((*journal)->recovered().sessions.size(), 1);
  ASSERT_EQ((*journal)->recovered().slabs.size(), 1);
  EXPECT_EQ((*journal)->recovered().slabs.begin()->second.inode(), 1003);
}

TEST_F(JournalTest, ATornTailIsCutOffAndWrittenOver) {
  ASSERT_TRUE((*Journal::Open(options_))->Append({Opened(1), Opened(2)}).ok());
  ASSERT_EQ(truncate(path().c_str(), static_cast<off_t>(Content().size()) - 3), 0);
  ASSERT_TRUE((*Journal::Open(options_))->Append({Opened(5)}).ok());
  auto journal = Journal::Open(options_);
  ASSERT_TRUE(journal.ok()) << journal.status();
  EXPECT_EQ((*journal)->generation(), 3);
  EXPECT_TRUE((*journal)->recovered().sessions.contains(SessionId(1)));
  EXPECT_FALSE((*journal)->recovered().sessions.contains(SessionId(2)));
  EXPECT_TRUE((*journal)->recovered().sessions.contains(SessionId(5)));
}

TEST_F(JournalTest, DamageInTheMiddleSaysWhatToDo) {
  ASSERT_TRUE((*Journal::Open(options_))->Append({Opened(1), Opened(2)}).ok());
  std::string content = Content();
  content[kJournalMagic.size() + 20] ^= 1;
  std::ofstream(path(), std::ios::binary) << content;
  const auto journal = Journal::Open(options_);
  EXPECT_EQ(journal.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(journal.status().message()), HasSubstr("stop all workers"));
  EXPECT_EQ(Content(), content) << "a damaged journal is evidence and stays as it is";
}

TEST_F(JournalTest, DamageFromBeforeAPowerCutIsForgiven) {
  ASSERT_TRUE((*Journal::Open(options_))->Append({Opened(1), Opened(2)}).ok());
  std::string content = Content();
  content[content.find("alpha")] ^= 1;
  std::ofstream(path(), std::ios::binary) << content;
  EXPECT_EQ(Journal::Open(options_).status().code(), absl::StatusCode::kDataLoss);
  options_.boot_id = "boot-2";
  const auto journal = Journal::Open(options_);
  ASSERT_TRUE(journal.ok()) << journal.status();
  EXPECT_EQ((*journal)->generation(), 2);
  EXPECT_TRUE((*journal)->recovered().sessions.empty());
}

TEST_F(JournalTest, TwoBrokersCannotShareADirectory) {
  const auto first = Journal::Open(options_);
  ASSERT_TRUE(first.ok());
  const auto second = Journal::Open(options_);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("another broker"));
}

TEST_F(JournalTest, ARebootForgetsHoldersAndKeepsCounting) {
  ASSERT_TRUE((*Journal::Open(options_))->Append({Opened(1), Granted(3, 1, 5)}).ok());
  options_.boot_id = "boot-2";
  const auto journal = Journal::Open(options_);
  ASSERT_TRUE(journal.ok());
  EXPECT_EQ((*journal)->generation(), 2);
  EXPECT_TRUE((*journal)->recovered().sessions.empty());
  EXPECT_TRUE((*journal)->recovered().slabs.empty());
}

TEST_F(JournalTest, CompactionKeepsTheFileSmallAndTheStateWhole) {
  options_.compact_above = KiB(4);
  {
    auto journal = Journal::Open(options_);
    ASSERT_TRUE((*journal)->Append({Opened(1)}).ok());
    for (uint64_t epoch = 1; epoch <= 2000; ++epoch) {
      ASSERT_TRUE((*journal)->Append({Granted(epoch % 8, 1, epoch)}).ok());
    }
  }
  EXPECT_LT(Content().size(), 8 << 10);
  auto journal = Journal::Open(options_);
  ASSERT_EQ((*journal)->recovered().slabs.size(), 8);
  for (const auto& [id, slab] : (*journal)->recovered().slabs) EXPECT_GT(slab.epoch(), 1992);
}

TEST_F(JournalTest, ConcurrentAppendsAreAllRecordedAndNotInterleaved) {
  {
    auto journal = Journal::Open(options_);
    std::vector<std::thread> threads;
    for (uint64_t t = 0; t < 8; ++t) {
      threads.emplace_back([&journal, t] {
        for (uint64_t i = 0; i < 50; ++i) {
          const uint64_t session = t * 1000 + i;
          EXPECT_TRUE((*journal)->Append({Opened(session), Granted(t, session, i + 1)}).ok());
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  auto journal = Journal::Open(options_);
  ASSERT_TRUE(journal.ok()) << journal.status();
  EXPECT_EQ((*journal)->recovered().sessions.size(), 400);
  EXPECT_EQ((*journal)->recovered().slabs.size(), 8);
}

TEST_F(JournalTest, AFullDiskRefusesTheRecordAndLosesNothing) {
  auto journal = Journal::Open(options_);
  ASSERT_TRUE((*journal)->Append({Opened(1)}).ok());
  // The file size limit stands in for a full disk: write(2) writes a part, then fails.
  signal(SIGXFSZ, SIG_IGN);
  rlimit old_limit;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old_limit), 0);
  const rlimit small{Content().size() + 10, old_limit.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const absl::Status refused = (*journal)->Append({Opened(2)});
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &old_limit), 0);
  EXPECT_FALSE(refused.ok());
  EXPECT_THAT(std::string(refused.message()), HasSubstr("nothing was recorded"));
  ASSERT_TRUE((*journal)->Append({Opened(3)}).ok());
  journal->reset();
  journal = Journal::Open(options_);
  ASSERT_TRUE(journal.ok()) << journal.status();
  EXPECT_EQ((*journal)->recovered().sessions.size(), 2);
  EXPECT_TRUE((*journal)->recovered().sessions.contains(SessionId(3)));
}

}  // namespace
}  // namespace palimpsest
