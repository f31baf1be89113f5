// What a slab physically is. One implementation per back-end of tier 0; the ledger, the journal and
// the sessions know slabs by id alone.
//
// A slab's memory is named by file descriptors that workers map: by one, or by one for each of its
// pieces where the pool lies on several GPUs. The device owns the originals; shares of them may be
// held while a hand-over is under way, and workers hold duplicates.
//
// A slab that comes back is cleaned in one of two ways. Retire replaces its memory, so that what a
// worker may still have is not the slab any more. Scrub zeroes it and keeps it: faster, and safe
// only if workers that said they unmapped it, did.
//
// Threads: thread-safe for different slabs; calls about one slab are serialised by the caller,
// except Descriptors, IdentityOf and MemoryId, which may come at any time. Create, Scrub and Retire
// touch all of the memory and may take a millisecond; the others do not block.
//
// Order for each slab: Create or Adopt, then any number of Scrub and Retire.
#ifndef PALIMPSEST_BROKER_DEVICE_SLAB_DEVICE_H_
#define PALIMPSEST_BROKER_DEVICE_SLAB_DEVICE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/fd.h"
#include "common/ids.h"

namespace palimpsest {

class SlabDevice {
 public:
  // Names memory on one boot of the machine. Host: fstat's st_dev and st_ino of the descriptor.
  // Zero while a slab has no memory.
  struct Identity {
    uint64_t device = 0;
    uint64_t inode = 0;

    friend bool operator==(const Identity&, const Identity&) = default;
  };

  // Bytes per second of copies between host memory and the device that a piece lies on.
  struct Link {
    double to_device = 0;
    double from_device = 0;
  };

  virtual ~SlabDevice() = default;

  // "host", "cuda".
  virtual std::string name() const = 0;

  // Descriptors of a slab.
  virtual size_t pieces() const { return 1; }

  // One for each piece, as fast as they were found; empty where slabs are host memory, or it is not
  // known.
  virtual std::vector<Link> Links() const { return {}; }

  // Gives the slab fresh, zeroed memory, charged to this process. ResourceExhausted when there is
  // none.
  virtual absl::Status Create(SlabId slab) = 0;

  // InvalidArgument if the descriptors are of other memory than was granted, or of more or fewer
  // pieces, as far as it can be told.
  virtual absl::Status CheckMemory(const SlabDescriptors& memory,
                                   const Identity& granted) const = 0;

  // Takes memory that an earlier broker process created, granted under that identity, and a worker
  // kept: CheckMemory, and that it is a slab of this pool (kind, size, access and seals).
  // InvalidArgument says what is wrong with it; AlreadyExists when the slab has memory.
  virtual absl::Status Adopt(SlabId slab, SlabDescriptors memory, const Identity& granted) = 0;

  // Zeroes slabs in place; a slab without memory gets some. On error all may hold anything, and
  // Scrub may be tried again. Unimplemented where slabs are always retired.
  virtual absl::Status Scrub(absl::Span<const SlabId> slabs) = 0;

  // Gives the slab fresh, zeroed memory. The old memory is taken away from everybody who has it
  // mapped (host: a later access is a SIGBUS), or stays with them alone until they are gone (GPU).
  // On error the slab has no memory, and Retire may be tried again.
  virtual absl::Status Retire(SlabId slab) = 0;

  // To hand to a worker; null while the slab has no memory.
  virtual std::shared_ptr<const SlabDescriptors> Descriptors(SlabId slab) = 0;

  virtual Identity IdentityOf(SlabId slab) = 0;

  // Memory of a slab's size on GPU `gpu` that is no slab, of undefined content: for copies of
  // parameter images. It lives as long as a descriptor or a mapping of it. ResourceExhausted when
  // there is none.
  virtual absl::StatusOr<UniqueFd> CreateBeside(int gpu) {
    (void)gpu;
    return absl::UnimplementedError("slabs are host memory");
  }

  // Not 0 if workers may keep what they imported after they gave the slab back, to map it again
  // when it is granted to them again with the same memory id.
  virtual uint64_t MemoryId(SlabId) { return 0; }
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_DEVICE_SLAB_DEVICE_H_
