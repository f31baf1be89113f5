// Restores an image on one GPU or on several at once: how fast beside plain copies of the same
// pages, what checksums cost, and that a wrong one is found.
#ifndef PALIMPSEST_TOOLS_GPU_CHECK_RESTORE_CHECK_H_
#define PALIMPSEST_TOOLS_GPU_CHECK_RESTORE_CHECK_H_

#include <string>
#include <vector>

#include "common/cuda/driver.h"
#include "tools/gpu_check/check_report.h"

namespace palimpsest {

// Of 2 GiB a GPU. Checks are named after `prefix`, which ends with a dot.
void CheckRestore(const CudaDriver& driver, const std::vector<int>& gpus, const std::string& prefix,
                  CheckReport& report);

}  // namespace palimpsest

#endif  // PALIMPSEST_TOOLS_GPU_CHECK_RESTORE_CHECK_H_
