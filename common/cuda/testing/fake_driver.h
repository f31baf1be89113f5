// TEST DOUBLE of the CUDA driver: a table of functions that keeps "GPU memory" in memory files and
// runs streams on threads, so that everything built on the table can be tested, over several
// processes too, on machines without a GPU. It proves nothing about speed, about kernels or about
// what a real driver does; tools/gpu-check runs the same code on a GPU.
//
// What it imitates, because callers depend on it: an allocation lives as long as a handle, a
// mapping or a descriptor of it; imported handles cannot be exported; whole allocations are mapped
// and unmapped; memory is accessible after cuMemSetAccess only (before, an access is a SIGSEGV);
// streams are in order and asynchronous; calls that need a context fail without one, and those
// about a stream or an event with the context of another device; memory is one device's, in every
// process, and copies and fills fail where it is open to another device than the stream's; copies
// of a batch lie within one allocation each, and go in no order; memory that this process may only
// read is registered as such.
//
// FakeCuda::kDevices devices, "Fake GPU". Thread-safe.
#ifndef PALIMPSEST_COMMON_CUDA_TESTING_FAKE_DRIVER_H_
#define PALIMPSEST_COMMON_CUDA_TESTING_FAKE_DRIVER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "common/bytes.h"
#include "common/cuda/driver.h"

namespace palimpsest {

const CudaDriver& FakeCudaDriver();

// What a test may ask for and interfere with. State of the process: Reset before a test that
// counts.
class FakeCuda {
 public:
  static constexpr Bytes kGranularity = MiB(2);
  static constexpr int kDevices = 3;

  // Streams run, no failures, no limit. Handles and mappings stay.
  static void Reset();

  // Memory of each device that cuMemCreate hands out in this process; OUT_OF_MEMORY beyond it.
  static void SetMemory(Bytes total);
  // Of one device.
  static void SetMemory(int device, Bytes total);
  // Created by this process on the device and still reachable from it: a handle or a mapping.
  static Bytes InUse(int device = 0);
  static size_t Handles();
  static size_t Mappings();
  static size_t Registered();  // host ranges
  static bool IsRegistered(const void* address);

  // As where no more memory may be pinned.
  static void RefuseRegistrations(bool refuse);
  // As a driver that has cuMemcpyBatchAsync and will not do it.
  static void RefuseBatches(bool refuse);
  // Copies that batches consisted of, since Reset.
  static int64_t BatchedCopies();

  // Whether devices reach each other's memory; they do after Reset.
  static void SetPeerAccess(bool possible);

  // No stream executes anything until Resume.
  static void Pause();
  static void Resume();

  // Inverts the first byte of the `count`-th (from 1) host-to-device copy that starts from now on.
  static void CorruptCopy(int count);

  // Kernels by name: called at launch with the parameters, returns what the stream runs.
  using Kernel = std::function<std::function<void()>(void** parameters)>;
  static void RegisterKernel(const std::string& name, Kernel kernel);
};

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_CUDA_TESTING_FAKE_DRIVER_H_
