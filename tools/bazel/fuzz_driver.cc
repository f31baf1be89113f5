// Runs a libFuzzer target without libFuzzer: every file or folder named on the command line, then
// seeded mutations of those inputs, the same ones each time, within a budget of inputs and seconds.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

using Input = std::vector<uint8_t>;

constexpr int kMutations = 5000;
constexpr size_t kMaxInput = 1 << 16;
// A guard for slow machines and sanitizers, not a target: a usual run ends far below it.
constexpr std::chrono::milliseconds kBudget{1500};

// The numbers at which lengths, offsets and counts break.
constexpr uint64_t kEdges[] = {0,          1,          7,           8,          0x7f,
                               0x80,       0xff,       0x7fff,      0xffff,     0x7fffffff,
                               0x80000000, 0xffffffff, 0x100000000, ~0ull >> 1, ~0ull};

class Mutator {
 public:
  explicit Mutator(const std::vector<Input>& corpus) : corpus_(corpus) {}

  Input Next() {
    Input input = corpus_.empty() ? Input() : corpus_[Below(corpus_.size())];
    for (size_t i = 1 + Below(4); i > 0; --i) MutateOnce(input);
    if (input.size() > kMaxInput) input.resize(kMaxInput);
    return input;
  }

 private:
  size_t Below(size_t n) { return n == 0 ? 0 : random_() % n; }
  size_t Position(const Input& input) { return Below(input.size() + 1); }

  void MutateOnce(Input& input) {
    switch (Below(7)) {
      case 0:
        if (!input.empty()) input[Below(input.size())] ^= static_cast<uint8_t>(1u << Below(8));
        break;
      case 1:
        if (!input.empty()) input[Below(input.size())] = static_cast<uint8_t>(random_());
        break;
      case 2:
        input.insert(input.begin() + Position(input), 1 + Below(8),
                     static_cast<uint8_t>(random_()));
        break;
      case 3:
        Erase(input);
        break;
      case 4:
        Overwrite(input);
        break;
      case 5:
        Splice(input);
        break;
      default:
        ReplaceNumber(input);
    }
  }

  void Erase(Input& input) {
    const size_t begin = Position(input);
    const size_t length = Below(2) == 0 ? 1 + Below(8) : input.size();
    input.erase(input.begin() + begin, input.begin() + std::min(input.size(), begin + length));
  }

  // An edge value as 1 to 8 little-endian bytes.
  void Overwrite(Input& input) {
    const uint64_t value = kEdges[Below(std::size(kEdges))];
    const size_t begin = Position(input);
    const size_t width = size_t{1} << Below(4);
    for (size_t i = 0; i < width && begin + i < input.size(); ++i) {
      input[begin + i] = static_cast<uint8_t>(value >> (8 * i));
    }
  }

  // Copies a piece of some corpus input into this one.
  void Splice(Input& input) {
    if (corpus_.empty()) return;
    const Input& other = corpus_[Below(corpus_.size())];
    const size_t begin = Position(other);
    const size_t length = std::min(other.size() - begin, 1 + Below(64));
    input.insert(input.begin() + Position(input), other.begin() + begin,
                 other.begin() + begin + length);
  }

  // Replaces a run of decimal digits by an edge value, for text formats.
  void ReplaceNumber(Input& input) {
    const auto is_digit = [](uint8_t c) { return c >= '0' && c <= '9'; };
    const auto begin = std::find_if(input.begin() + Position(input), input.end(), is_digit);
    if (begin == input.end()) return;
    const auto end = std::find_if_not(begin, input.end(), is_digit);
    const std::string text = std::to_string(kEdges[Below(std::size(kEdges))]);
    const auto at = input.erase(begin, end);
    input.insert(at, text.begin(), text.end());
  }

  const std::vector<Input>& corpus_;
  std::mt19937_64 random_{20240229};
};

bool Load(const std::filesystem::path& path, std::vector<Input>& corpus) {
  std::vector<std::filesystem::path> files;
  if (std::filesystem::is_directory(path)) {
    for (const auto& entry : std::filesystem::recursive_directory_iterator(path)) {
      if (entry.is_regular_file()) files.push_back(entry.path());
    }
    std::sort(files.begin(), files.end());
  } else {
    files.push_back(path);
  }
  for (const auto& file : files) {
    std::ifstream in(file, std::ios::binary);
    if (!in) {
      std::fprintf(stderr, "%s: cannot be read\n", file.c_str());
      return false;
    }
    corpus.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<Input> corpus;
  for (int i = 1; i < argc; ++i) {
    if (!Load(argv[i], corpus)) return EXIT_FAILURE;
  }
  for (const Input& input : corpus) LLVMFuzzerTestOneInput(input.data(), input.size());
  LLVMFuzzerTestOneInput(nullptr, 0);
  const auto deadline = std::chrono::steady_clock::now() + kBudget;
  Mutator mutator(corpus);
  int done = 0;
  for (; done < kMutations && std::chrono::steady_clock::now() < deadline; ++done) {
    const Input input = mutator.Next();
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  std::printf("%zu corpus inputs, %d mutations\n", corpus.size(), done);
  return EXIT_SUCCESS;
}
