// How fast a broker and a worker process move memory of GPU 0: grants of whole slabs beside grants
// of pages of 2 MiB, one at a time and all at once.
#ifndef PALIMPSEST_TOOLS_GPU_CHECK_GRANT_RATE_H_
#define PALIMPSEST_TOOLS_GPU_CHECK_GRANT_RATE_H_

#include "tools/gpu_check/check_report.h"

namespace palimpsest {

// The process must be one that runs RunGpuWorker when it is started with --worker.
void CheckGrantRate(CheckReport& report);

}  // namespace palimpsest

#endif  // PALIMPSEST_TOOLS_GPU_CHECK_GRANT_RATE_H_
