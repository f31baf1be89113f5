#include "worker/compute/cpu/packing.h"

#include <bit>
#include <cassert>

namespace palimpsest {
namespace {

constexpr int64_t kHalfPanel = kPanelRows / 2;

// Index, in 16-bit units, of element (row, 0); element (row, k) is kPanelRows units per k further.
constexpr int64_t FirstElement(int64_t row, int64_t cols) {
  const int64_t lane = row % kPanelRows;
  return row / kPanelRows * cols * kPanelRows + lane % kHalfPanel * 2 + lane / kHalfPanel;
}

}  // namespace

void PackRows(const uint16_t* bf16_row_major, int64_t first_row, int64_t row_count, int64_t rows,
              int64_t cols, std::byte* packed) {
  assert(first_row >= 0 && row_count >= 0 && first_row + row_count <= rows);
  auto* elements = reinterpret_cast<uint16_t*>(packed);
  for (int64_t r = 0; r < row_count; ++r) {
    uint16_t* to = elements + FirstElement(first_row + r, cols);
    const uint16_t* from = bf16_row_major + r * cols;
    for (int64_t k = 0; k < cols; ++k) to[k * kPanelRows] = from[k];
  }
  if (first_row + row_count != rows) return;
  for (int64_t row = rows; row < PanelCount(rows) * kPanelRows; ++row) {
    uint16_t* to = elements + FirstElement(row, cols);
    for (int64_t k = 0; k < cols; ++k) to[k * kPanelRows] = 0;
  }
}

void UnpackRow(const std::byte* packed, int64_t row, int64_t cols, float* out) {
  const auto* from = reinterpret_cast<const uint16_t*>(packed) + FirstElement(row, cols);
  for (int64_t k = 0; k < cols; ++k) {
    out[k] = std::bit_cast<float>(uint32_t{from[k * kPanelRows]} << 16);
  }
}

}  // namespace palimpsest
