// A number of bytes, as a type. `MiB(2) * 3`, `a / b` (how many b fit in a), `CeilDiv(a, b)`.
#ifndef PALIMPSEST_COMMON_BYTES_H_
#define PALIMPSEST_COMMON_BYTES_H_

#include <compare>
#include <cstdint>
#include <ostream>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace palimpsest {

class Bytes {
 public:
  constexpr Bytes() = default;
  constexpr explicit Bytes(int64_t count) : count_(count) {}

  constexpr int64_t count() const { return count_; }

  friend constexpr auto operator<=>(Bytes, Bytes) = default;

  constexpr Bytes& operator+=(Bytes other) {
    count_ += other.count_;
    return *this;
  }
  constexpr Bytes& operator-=(Bytes other) {
    count_ -= other.count_;
    return *this;
  }
  friend constexpr Bytes operator+(Bytes a, Bytes b) { return Bytes(a.count_ + b.count_); }
  friend constexpr Bytes operator-(Bytes a, Bytes b) { return Bytes(a.count_ - b.count_); }
  friend constexpr Bytes operator*(Bytes a, int64_t n) { return Bytes(a.count_ * n); }
  friend constexpr Bytes operator*(int64_t n, Bytes a) { return Bytes(a.count_ * n); }
  friend constexpr int64_t operator/(Bytes a, Bytes b) { return a.count_ / b.count_; }
  friend constexpr Bytes operator/(Bytes a, int64_t n) { return Bytes(a.count_ / n); }

  friend std::ostream& operator<<(std::ostream& out, Bytes b) { return out << b.ToString(); }

  // "296 MiB", "1.5 GiB", "17 B": at most one digit after the point.
  std::string ToString() const;

 private:
  int64_t count_ = 0;
};

constexpr Bytes KiB(int64_t n) { return Bytes(n << 10); }
constexpr Bytes MiB(int64_t n) { return Bytes(n << 20); }
constexpr Bytes GiB(int64_t n) { return Bytes(n << 30); }

// The smallest n with n * b >= a. Requires a >= 0, b > 0.
constexpr int64_t CeilDiv(Bytes a, Bytes b) { return (a.count() + b.count() - 1) / b.count(); }
constexpr Bytes RoundUp(Bytes a, Bytes multiple) { return multiple * CeilDiv(a, multiple); }

// Parses "4096", "64 KiB", "1.5GiB", "2MB" (decimal units are powers of 1000). Negative, fractional
// results and overflow are InvalidArgument.
absl::StatusOr<Bytes> ParseBytes(absl::string_view text);

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_BYTES_H_
