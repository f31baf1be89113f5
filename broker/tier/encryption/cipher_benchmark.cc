// What enciphering a block costs beside copying it, on one core.
#include <cstring>
#include <vector>

#include "benchmark/benchmark.h"
#include "broker/tier/encryption/tenant_cipher.h"

namespace palimpsest {
namespace {

constexpr size_t kTokens = 16;

struct Block {
  explicit Block(int64_t length)
      : record{.id = {.key = {1, 2}, .tokens = std::vector<TokenId>(kTokens), .tenant = "anna"},
               .length = Bytes(length)},
        plain(length, std::byte{7}),
        sealed(TenantCipher::SealedLength(record.length).count()) {}

  BlockRecord record;
  std::vector<std::byte> plain, sealed;
};

void CountBytes(benchmark::State& state) {
  state.SetBytesProcessed(state.iterations() * state.range(0));
}

void Copy(benchmark::State& state) {
  Block block(state.range(0));
  for (auto _ : state) {
    std::memcpy(block.sealed.data(), block.plain.data(), block.plain.size());
    benchmark::ClobberMemory();
  }
  CountBytes(state);
}

void Seal(benchmark::State& state) {
  const TenantCipher cipher(SecretKey::Random());
  Block block(state.range(0));
  for (auto _ : state) cipher.SealBytes(block.record, block.plain, absl::MakeSpan(block.sealed));
  CountBytes(state);
}

void Open(benchmark::State& state) {
  const TenantCipher cipher(SecretKey::Random());
  Block block(state.range(0));
  cipher.SealBytes(block.record, block.plain, absl::MakeSpan(block.sealed));
  for (auto _ : state) {
    const absl::Status status =
        cipher.OpenBytes(block.record, block.sealed, absl::MakeSpan(block.plain));
    if (!status.ok()) state.SkipWithError("a block was not opened");
  }
  CountBytes(state);
}

void OpenRecord(benchmark::State& state) {
  const TenantCipher cipher(SecretKey::Random());
  const BlockRecord sealed = cipher.SealRecord(Block(1).record);
  for (auto _ : state) benchmark::DoNotOptimize(cipher.OpenRecord(sealed).ok());
}

BENCHMARK(Copy)->Arg(64 << 10)->Arg(2 << 20);
BENCHMARK(Seal)->Arg(64 << 10)->Arg(2 << 20);
BENCHMARK(Open)->Arg(64 << 10)->Arg(2 << 20);
BENCHMARK(OpenRecord);

}  // namespace
}  // namespace palimpsest

BENCHMARK_MAIN();
