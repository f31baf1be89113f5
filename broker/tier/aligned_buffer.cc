#include "broker/tier/aligned_buffer.h"

#include <cassert>
#include <cstring>
#include <new>

namespace palimpsest {

AlignedBuffer::AlignedBuffer(Bytes size) : size_(static_cast<size_t>(size.count())) {
  assert(size_ % kIoUnit.count() == 0);
  if (size_ == 0) return;
  data_.reset(static_cast<std::byte*>(std::aligned_alloc(kIoUnit.count(), size_)));
  if (data_ == nullptr) throw std::bad_alloc();
  std::memset(data_.get(), 0, size_);
}

}  // namespace palimpsest
