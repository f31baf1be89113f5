// A growing array of floats, aligned to cache lines, whose contents are scratch.
#ifndef PALIMPSEST_WORKER_COMPUTE_CPU_FLOAT_BUFFER_H_
#define PALIMPSEST_WORKER_COMPUTE_CPU_FLOAT_BUFFER_H_

#include <cstdint>
#include <memory>
#include <new>

namespace palimpsest {

class FloatBuffer {
 public:
  // Makes room for `size` floats; loses the contents when it has to grow.
  void Reserve(int64_t size) {
    if (size <= capacity_) return;
    capacity_ = size + size / 2;
    data_.reset();
    data_.reset(static_cast<float*>(operator new(capacity_ * sizeof(float), kAlignment)));
  }

  float* data() { return data_.get(); }
  const float* data() const { return data_.get(); }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Delete {
    void operator()(float* p) const { operator delete(p, kAlignment); }
  };

  std::unique_ptr<float, Delete> data_;
  int64_t capacity_ = 0;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_COMPUTE_CPU_FLOAT_BUFFER_H_
