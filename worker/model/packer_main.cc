// palimpsest-packer: started by the broker to fill a parameter image (see packer.h).
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "CLI/CLI.hpp"
#include "worker/model/packer.h"

int main(int argc, char** argv) {
  palimpsest::PackRequest request;
  int64_t slab_bytes = 0;
  std::string format, kv_dtype = "bf16";
  CLI::App app("Writes a model folder as a parameter image into an open memfd");
  app.add_option("--model", request.model_folder, "Hugging Face model folder")->required();
  app.add_option("--slab-bytes", slab_bytes, "size of a slab in bytes")->required();
  app.add_option("--kv-block-tokens", request.kv_block_tokens, "tokens of one KV block")
      ->required();
  app.add_option("--max-sequence-tokens", request.max_sequence_tokens,
                 "longest sequence that will be served, in tokens")
      ->required();
  app.add_option("--format", format, "cpu-panels or row-major")->required();
  app.add_option("--kv-dtype", kv_dtype, "bf16 or fp8_e4m3");
  app.add_option("--ranks", request.ranks, "GPUs that the model is cut for; 1 by default");
  app.add_option("--dummy-seed", request.dummy_seed,
                 "generate the weights from this seed instead of reading them");
  app.add_option("--output-fd", request.output_fd, "descriptor of the memfd")->required();
  app.add_option("--manifest-fd", request.manifest_fd,
                 "descriptor that gets the serialized ImageManifest")
      ->required();
  app.add_option("--progress-fd", request.progress_fd,
                 "descriptor that gets lines \"pack DONE TOTAL\"");
  CLI11_PARSE(app, argc, argv);

  request.slab_bytes = palimpsest::Bytes(slab_bytes);
  std::signal(SIGPIPE, SIG_IGN);
  const auto parsed = palimpsest::ParseWeightFormat(format);
  const auto dtype = palimpsest::ParseKvDtype(kv_dtype);
  absl::Status status = parsed.status();
  status.Update(dtype.status());
  if (status.ok()) {
    request.format = *parsed;
    request.kv_dtype = *dtype;
    status = palimpsest::Pack(request);
  }
  if (status.ok()) return EXIT_SUCCESS;
  std::fprintf(stderr, "palimpsest-packer: %s\n", status.ToString().c_str());
  return EXIT_FAILURE;
}
