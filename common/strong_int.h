// A strongly typed integer: `StrongInt<struct SlabIdTag, uint32_t>` compares, hashes and prints
// like its value, but never converts to or from another id or a bare integer by accident.
#ifndef PALIMPSEST_COMMON_STRONG_INT_H_
#define PALIMPSEST_COMMON_STRONG_INT_H_

#include <compare>
#include <cstdint>
#include <ostream>
#include <string>
#include <utility>

namespace palimpsest {

template <typename Tag, typename Rep>
class StrongInt {
 public:
  using Value = Rep;

  constexpr StrongInt() = default;
  constexpr explicit StrongInt(Rep value) : value_(value) {}

  constexpr Rep value() const { return value_; }

  friend constexpr auto operator<=>(StrongInt, StrongInt) = default;

  constexpr StrongInt& operator++() {
    ++value_;
    return *this;
  }

  template <typename H>
  friend H AbslHashValue(H state, StrongInt id) {
    return H::combine(std::move(state), id.value_);
  }

  friend std::ostream& operator<<(std::ostream& out, StrongInt id) { return out << id.ToString(); }
  std::string ToString() const { return std::to_string(value_); }

 private:
  Rep value_ = 0;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_STRONG_INT_H_
