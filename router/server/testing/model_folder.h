// A model folder for tests of text: one token per byte (id = byte value), 256 is <|end|>, the end
// of sequence; 64 positions; the chat template writes <role>content ... <assistant>.
#ifndef PALIMPSEST_ROUTER_SERVER_TESTING_MODEL_FOLDER_H_
#define PALIMPSEST_ROUTER_SERVER_TESTING_MODEL_FOLDER_H_

#include <string>

namespace palimpsest::router::testing {

inline constexpr int kEndToken = 256;
inline constexpr int kVocabSize = 257;
inline constexpr int kMaxPosition = 64;

// Writes config.json, tokenizer.json and tokenizer_config.json into `folder`, which exists.
void WriteModelFolder(const std::string& folder);

// A fresh folder that is removed at the end.
class TempFolder {
 public:
  TempFolder();
  ~TempFolder();
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  const std::string& path() const { return path_; }
  // The path of a file in it, which is written with mode 0600.
  std::string Write(const std::string& name, const std::string& content) const;

 private:
  std::string path_;
};

}  // namespace palimpsest::router::testing

#endif  // PALIMPSEST_ROUTER_SERVER_TESTING_MODEL_FOLDER_H_
