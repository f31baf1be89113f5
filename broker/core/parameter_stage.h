// Where a stage of a model lies in the parameter region.
#ifndef PALIMPSEST_BROKER_CORE_PARAMETER_STAGE_H_
#define PALIMPSEST_BROKER_CORE_PARAMETER_STAGE_H_

#include <cstdint>

namespace palimpsest {

// Slabs [first_slab, first_slab + slab_count) of the parameter region, one step of the forward
// pass.
struct ParameterStage {
  uint32_t first_slab = 0;
  uint32_t slab_count = 0;
  // A layer, of a worker that can let layers rotate.
  bool may_rotate = false;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_CORE_PARAMETER_STAGE_H_
