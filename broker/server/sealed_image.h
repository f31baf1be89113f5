// A finished parameter image: sealed memory, read-only for everybody, with checksums.
#ifndef PALIMPSEST_BROKER_SERVER_SEALED_IMAGE_H_
#define PALIMPSEST_BROKER_SERVER_SEALED_IMAGE_H_

#include <memory>
#include <string>
#include <vector>

#include "broker/core/arbiter.h"
#include "common/fd.h"
#include "proto/palimpsest/v1/broker.pb.h"

namespace palimpsest {

// Immutable. Sessions share it; the memory goes when the last of them and the manager let go.
struct SealedImage {
  std::string fingerprint;  // 32 bytes
  v1::ImageManifest manifest;
  std::vector<ParameterStage> stages;
  // Opened read-only.
  std::shared_ptr<const UniqueFd> descriptor;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_SERVER_SEALED_IMAGE_H_
