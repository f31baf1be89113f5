// Runs the packer as the broker does: another process, a memfd and two pipes.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/fd.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/compute/cpu/packing.h"
#include "worker/model/image_builder.h"
#include "worker/model/image_checksums.h"
#include "worker/model/manifest.h"
#include "worker/model/testing.h"

namespace palimpsest {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr Bytes kSlab = KiB(64);

// Collects what is written to a pipe until every writer has closed it.
class PipeReader {
 public:
  PipeReader() {
    int ends[2];
    EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0);
    read_.Reset(ends[0]);
    write_.Reset(ends[1]);
    thread_ = std::thread([this] {
      char buffer[4096];
      for (ssize_t n; (n = read(read_.get(), buffer, sizeof(buffer))) > 0;) text_.append(buffer, n);
    });
  }
  ~PipeReader() {
    if (thread_.joinable()) Text();
  }

  int write_end() const { return write_.get(); }

  const std::string& Text() {
    write_.Reset();
    if (thread_.joinable()) thread_.join();
    return text_;
  }

 private:
  UniqueFd read_;
  UniqueFd write_;
  std::string text_;
  std::thread thread_;
};

struct Outcome {
  int exit_code = -1;  // -1: ended by a signal
  std::string manifest;
  std::string progress;
  std::string errors;
};

class PackerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = ::testing::TempDir() + "/packer_XXXXXX";
    ASSERT_NE(mkdtemp(folder_.data()), nullptr);
    memfd_.Reset(memfd_create("image", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    ASSERT_TRUE(memfd_.valid());
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  // `output` is the child's descriptor 3, manifest 4, progress 5.
  Outcome Run(const std::vector<std::string>& extra, int output) {
    std::vector<std::string> args = {"worker/model/packer", "--output-fd=3",
                                     "--manifest-fd=4",     "--progress-fd=5",
                                     "--model=" + folder_,  "--format=" + format_};
    args.insert(args.end(), extra.begin(), extra.end());
    std::vector<char*> argv;
    for (std::string& arg : args) argv.push_back(arg.data());
    argv.push_back(nullptr);
    PipeReader manifest, progress, errors;
    // Above the numbers that the child gets, so that no dup2 overwrites a source.
    UniqueFd sources[] = {UniqueFd(fcntl(errors.write_end(), F_DUPFD_CLOEXEC, 16)),
                          UniqueFd(fcntl(output, F_DUPFD_CLOEXEC, 16)),
                          UniqueFd(fcntl(manifest.write_end(), F_DUPFD_CLOEXEC, 16)),
                          UniqueFd(fcntl(progress.write_end(), F_DUPFD_CLOEXEC, 16))};
    const pid_t child = fork();
    if (child == 0) {
      for (int i = 0; i < 4; ++i) dup2(sources[i].get(), i + 2);
      execv(argv[0], argv.data());
      _exit(127);
    }
    int status = 0;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    for (UniqueFd& fd : sources) fd.Reset();
    return {.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1,
            .manifest = manifest.Text(),
            .progress = progress.Text(),
            .errors = errors.Text()};
  }

  Outcome Pack(const std::vector<std::string>& extra = {}) {
    std::vector<std::string> args = {absl::StrCat("--slab-bytes=", kSlab.count()),
                                     "--kv-block-tokens=16", "--max-sequence-tokens=256"};
    args.insert(args.end(), extra.begin(), extra.end());
    return Run(args, memfd_.get());
  }

  void ExpectFailure(const Outcome& outcome, const std::string& message) {
    EXPECT_GT(outcome.exit_code, 0);
    EXPECT_THAT(outcome.errors, HasSubstr(message));
    EXPECT_THAT(outcome.manifest, IsEmpty());
  }

  std::string folder_;
  std::string format_ = "cpu-panels";
  UniqueFd memfd_;
};

TEST_F(PackerTest, GeneratesWeightsThatTheFolderLacks) {
  const ModelConfig config = TinyModelConfig();
  std::ofstream(folder_ + "/config.json") << ModelConfigJson(config);
  ExpectFailure(Pack(), "safetensors");
  const Outcome outcome = Pack({"--dummy-seed=7"});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.errors;
  const ImageLayout layout = *LayOutImage(config, kSlab);
  std::vector<std::byte> expected(static_cast<size_t>(layout.total.count()) + 64);
  const size_t shift = 64 - reinterpret_cast<uintptr_t>(expected.data()) % 64;
  const auto image = absl::MakeSpan(expected).subspan(shift, expected.size() - 64);
  ASSERT_TRUE(BuildDummyImage(7, config, layout, image).ok());
  std::vector<std::byte> got(image.size());
  ASSERT_EQ(pread(memfd_.get(), got.data(), got.size(), 0), std::ssize(got));
  EXPECT_TRUE(std::equal(got.begin(), got.end(), image.begin()));
  EXPECT_GT(Pack({"--dummy-seed=seven"}).exit_code, 0);
}

TEST_F(PackerTest, FillsAnImageThatCanBeSealed) {
  ModelConfig config = TinyModelConfig();
  config.qkv_bias = config.o_bias = true;
  ASSERT_TRUE(WriteRandomModel(folder_, config, {.seed = 3, .shards = 2}).ok());
  const Outcome outcome = Pack();
  ASSERT_EQ(outcome.exit_code, 0) << outcome.errors;
  EXPECT_THAT(outcome.errors, IsEmpty());
  ASSERT_EQ(fcntl(memfd_.get(), F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW), 0)
      << strerror(errno);

  const ImageLayout layout = *LayOutImage(config, kSlab);
  ASSERT_EQ(lseek(memfd_.get(), 0, SEEK_END), layout.total.count());
  void* data = mmap(nullptr, layout.total.count(), PROT_READ, MAP_SHARED, memfd_.get(), 0);
  ASSERT_NE(data, MAP_FAILED);
  const absl::Span<const std::byte> image(static_cast<const std::byte*>(data),
                                          static_cast<size_t>(layout.total.count()));

  v1::ImageManifest manifest;
  ASSERT_TRUE(manifest.ParseFromString(outcome.manifest));
  EXPECT_THAT(manifest.fingerprint(), IsEmpty());
  manifest.set_fingerprint(std::string(32, 'f'));
  for (const uint64_t sum : ImageChecksums(image, kSlab)) manifest.add_slab_checksums(sum);
  const absl::Status status = CheckManifest(manifest, config, layout);
  EXPECT_TRUE(status.ok()) << status;

  const int64_t q_rows = config.num_heads * config.head_dim;
  for (const RandomTensor& tensor : RandomTensors(config, 3)) {
    std::vector<float> got(tensor.values.size());
    if (tensor.name == "model.layers.1.self_attn.k_proj.weight") {
      for (int64_t row = 0; row < tensor.shape[0]; ++row) {
        UnpackRow(image.data() + layout.layers[1].qkv.offset.count(), q_rows + row,
                  config.hidden_size, got.data() + row * config.hidden_size);
      }
    } else if (tensor.name == "lm_head.weight") {
      for (int64_t row = 0; row < tensor.shape[0]; ++row) {
        UnpackRow(image.data() + layout.lm_head.offset.count(), row, config.hidden_size,
                  got.data() + row * config.hidden_size);
      }
    } else if (tensor.name == "model.layers.0.self_attn.o_proj.bias") {
      std::memcpy(got.data(), image.data() + layout.layers[0].o_bias.offset.count(),
                  got.size() * sizeof(float));
    } else {
      continue;
    }
    EXPECT_EQ(got, tensor.values) << tensor.name;
  }
  munmap(data, layout.total.count());
}

TEST_F(PackerTest, IsTheImageBuiltInProcessWhateverTheFileHeldBefore) {
  const ModelConfig config = TinyModelConfig();
  ASSERT_TRUE(WriteRandomModel(folder_, config).ok());
  const std::string old(3 << 20, 'x');
  ASSERT_EQ(write(memfd_.get(), old.data(), old.size()), static_cast<ssize_t>(old.size()));
  ASSERT_EQ(Pack().exit_code, 0);
  const ImageLayout layout = *LayOutImage(config, kSlab);
  const size_t size = static_cast<size_t>(layout.total.count());
  ASSERT_EQ(lseek(memfd_.get(), 0, SEEK_END), layout.total.count());
  std::string packed(size, '\0');
  ASSERT_EQ(pread(memfd_.get(), packed.data(), size, 0), static_cast<ssize_t>(size));
  auto* expected = static_cast<std::byte*>(std::aligned_alloc(4096, size));
  std::memset(expected, 0, size);
  auto checkpoint = Checkpoint::Open(folder_);
  ASSERT_TRUE(BuildImage(*checkpoint, config, layout, absl::MakeSpan(expected, size)).ok());
  EXPECT_EQ(std::memcmp(packed.data(), expected, size), 0);
  std::free(expected);
}

TEST_F(PackerTest, ReportsProgressInLines) {
  ASSERT_TRUE(WriteRandomModel(folder_, TinyModelConfig()).ok());
  const Outcome outcome = Pack();
  std::istringstream lines(outcome.progress);
  std::string word;
  int64_t done = 0, total = 0, last = 0;
  int count = 0;
  for (; lines >> word >> done >> total; ++count) {
    EXPECT_EQ(word, "pack");
    EXPECT_GT(done, last);
    last = done;
  }
  EXPECT_TRUE(lines.eof());
  EXPECT_GT(count, 1);
  EXPECT_EQ(last, total);
}

TEST_F(PackerTest, NamesWhatIsWrongWithTheFolder) {
  ExpectFailure(Pack(), "config.json");
  ModelConfig config = TinyModelConfig();
  ASSERT_TRUE(WriteRandomModel(folder_, config).ok());
  std::vector<RandomTensor> tensors = RandomTensors(config, 1);
  tensors.pop_back();
  ASSERT_TRUE(WriteSafetensors(folder_ + "/model.safetensors", "BF16", tensors).ok());
  ExpectFailure(Pack(), folder_ + ": the model folder lacks tensors: lm_head.weight");
  std::filesystem::resize_file(folder_ + "/model.safetensors", 5000);
  ExpectFailure(Pack(), "model.safetensors");
}

TEST_F(PackerTest, RefusesArgumentsOutOfRange) {
  ASSERT_TRUE(WriteRandomModel(folder_, TinyModelConfig()).ok());
  ExpectFailure(
      Run({"--slab-bytes=1000", "--kv-block-tokens=16", "--max-sequence-tokens=256"}, memfd_.get()),
      "multiple of 4096");
  ExpectFailure(
      Run({"--slab-bytes=65536", "--kv-block-tokens=0", "--max-sequence-tokens=256"}, memfd_.get()),
      "KV block");
  ExpectFailure(Run({"--slab-bytes=65536", "--kv-block-tokens=16", "--max-sequence-tokens=513"},
                    memfd_.get()),
                "longest sequence");
  ExpectFailure(Run({"--slab-bytes=65536"}, memfd_.get()), "required");
  format_ = "columns";
  ExpectFailure(Pack(), "row-major");
}

TEST_F(PackerTest, ReportsAFileThatCannotHoldTheImage) {
  ASSERT_TRUE(WriteRandomModel(folder_, TinyModelConfig()).ok());
  ASSERT_EQ(fcntl(memfd_.get(), F_ADD_SEALS, F_SEAL_GROW), 0);
  ExpectFailure(Pack(), "image file");
  PipeReader pipe;
  ExpectFailure(Run({"--slab-bytes=65536", "--kv-block-tokens=16", "--max-sequence-tokens=256"},
                    pipe.write_end()),
                "image file");
}

}  // namespace
}  // namespace palimpsest
