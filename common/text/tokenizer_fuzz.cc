// Parses any bytes as a tokenizer.json; whatever is accepted must encode and decode.
#include <cstddef>
#include <cstdint>

#include "common/text/detokenizer.h"
#include "common/text/tokenizer.h"
#include "common/text/utf8.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using palimpsest::TokenId;
  const absl::string_view json(reinterpret_cast<const char*>(data), size);
  const auto tokenizer = palimpsest::Tokenizer::Parse(json);
  if (!tokenizer.ok()) return 0;
  constexpr absl::string_view kText = "ab  12\n<s>é'll\u0301 漢🙂\t";
  const auto ids = (*tokenizer)->Encode(kText, {.add_special = true});
  if (!ids.ok()) return 0;
  palimpsest::Detokenizer stream(tokenizer->get(), {"ll"});
  std::string text;
  for (const TokenId id : *ids) {
    if (id < 0 || id >= (*tokenizer)->vocab_size()) __builtin_trap();
    text += stream.Push(id);
  }
  text += stream.Finish();
  if (!palimpsest::IsValidUtf8(text)) __builtin_trap();
  return 0;
}
