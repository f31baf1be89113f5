// What a slab physically is. One implementation per back-end of tier 0; the ledger, the journal and
// the sessions know slabs by id alone.
//
// A slab's memory is named by a file descriptor that workers map. The device owns the original;
// shares of it may be held while a hand-over is under way, and workers hold duplicates. What a
// worker may still have after a slab was retired is worthless: the memory behind it is gone.
//
// Threads: thread-safe for different slabs; calls about one slab are serialised by the caller,
// except Descriptor and IdentityOf, which may come at any time. Create and Retire fault memory in
// and may take a millisecond; the others do not block.
//
// Order for each slab: Create or Adopt, then any number of Retire.
#ifndef PALIMPSEST_BROKER_DEVICE_SLAB_DEVICE_H_
#define PALIMPSEST_BROKER_DEVICE_SLAB_DEVICE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "common/fd.h"
#include "common/ids.h"

namespace palimpsest {

class SlabDevice {
 public:
  // Names the memory behind a descriptor on one boot of the machine: fstat's st_dev and st_ino.
  // Zero while a slab has no memory.
  struct Identity {
    uint64_t device = 0;
    uint64_t inode = 0;

    friend bool operator==(const Identity&, const Identity&) = default;
  };

  virtual ~SlabDevice() = default;

  // "host", "cuda".
  virtual std::string name() const = 0;

  // Gives the slab fresh, zeroed memory, charged to this process. ResourceExhausted when there is
  // none.
  virtual absl::Status Create(SlabId slab) = 0;

  // Takes memory that an earlier broker process created and a worker kept. The caller has compared
  // its identity with the journal; the device checks that it is a slab of this pool: kind, size,
  // access and seals. InvalidArgument says what is wrong with it; AlreadyExists when the slab has
  // memory.
  virtual absl::Status Adopt(SlabId slab, UniqueFd memory) = 0;

  // Takes the memory away from everybody who has it mapped, whether he cooperates or not (a later
  // access is a SIGBUS), and gives the slab fresh, zeroed memory instead. On error the slab has no
  // memory, the old one is gone all the same, and Retire may be tried again.
  virtual absl::Status Retire(SlabId slab) = 0;

  // To hand to a worker; null while the slab has no memory.
  virtual std::shared_ptr<const UniqueFd> Descriptor(SlabId slab) = 0;

  virtual Identity IdentityOf(SlabId slab) = 0;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_DEVICE_SLAB_DEVICE_H_
