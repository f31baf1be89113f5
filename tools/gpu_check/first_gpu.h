// The GPU that checks of one process run on.
#ifndef PALIMPSEST_TOOLS_GPU_CHECK_FIRST_GPU_H_
#define PALIMPSEST_TOOLS_GPU_CHECK_FIRST_GPU_H_

#include <optional>
#include <utility>

#include "common/cuda/context.h"
#include "tools/gpu_check/check_report.h"

namespace palimpsest {

struct FirstGpu {
  const CudaDriver* driver = nullptr;
  CudaContextPtr context;
};

// GPU 0, its context current on this thread. Nothing, and reported, if it cannot be used.
inline std::optional<FirstGpu> OpenFirstGpu(CheckReport& report) {
  const auto driver = CudaDriver::Load();
  if (!report.Expect("driver", driver.status())) return std::nullopt;
  auto context = CudaContext::Open(**driver, 0);
  if (!report.Expect("context", context.status()) ||
      !report.Expect("context", (*context)->MakeCurrent())) {
    return std::nullopt;
  }
  return FirstGpu{*driver, *std::move(context)};
}

}  // namespace palimpsest

#endif  // PALIMPSEST_TOOLS_GPU_CHECK_FIRST_GPU_H_
