// Speed of encoding: tokenizer_benchmark MODEL_FOLDER TEXT_FILE
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>

#include "benchmark/benchmark.h"
#include "common/text/tokenizer.h"

namespace palimpsest {
namespace {

void Encode(benchmark::State& state, const Tokenizer& tokenizer, const std::string& text) {
  size_t tokens = 0;
  for (auto _ : state) {
    const auto ids = tokenizer.Encode(text);
    if (!ids.ok()) return state.SkipWithError(ids.status().ToString().c_str());
    tokens += ids->size();
  }
  state.SetBytesProcessed(state.iterations() * text.size());
  state.counters["tokens"] =
      benchmark::Counter(static_cast<double>(tokens), benchmark::Counter::kIsRate);
}

int Run(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (argc != 3) {
    std::cerr << "usage: tokenizer_benchmark MODEL_FOLDER TEXT_FILE\n";
    return EXIT_FAILURE;
  }
  const auto tokenizer = Tokenizer::Load(argv[1]);
  std::ifstream file(argv[2], std::ios::binary);
  if (!tokenizer.ok() || !file) {
    std::cerr << (tokenizer.ok() ? "cannot read the text" : tokenizer.status().ToString()) << "\n";
    return EXIT_FAILURE;
  }
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  benchmark::RegisterBenchmark("Encode", [&](benchmark::State& state) {
    Encode(state, **tokenizer, text);
  })->Unit(benchmark::kMillisecond);
  benchmark::RunSpecifiedBenchmarks();
  return EXIT_SUCCESS;
}

}  // namespace
}  // namespace palimpsest

int main(int argc, char** argv) { return palimpsest::Run(argc, argv); }
