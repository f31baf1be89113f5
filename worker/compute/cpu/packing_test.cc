#include "worker/compute/cpu/packing.h"

#include <algorithm>
#include <bit>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace palimpsest {
namespace {

std::vector<uint16_t> RandomBf16(int64_t count, std::mt19937& random) {
  std::vector<uint16_t> values(count);
  for (uint16_t& v : values) v = static_cast<uint16_t>(random());
  return values;
}

TEST(Packing, SizeIsWholePanels) {
  EXPECT_EQ(PackedMatrixBytes(32, 10), Bytes(640));
  EXPECT_EQ(PackedMatrixBytes(33, 10), Bytes(1280));
  EXPECT_EQ(PackedMatrixBytes(1, 1), Bytes(64));
  EXPECT_EQ(PackedMatrixBytes(49152, 576), Bytes(49152 * 576 * 2));
}

TEST(Packing, UnpackInvertsPackForAnyShapePiecesAndOrder) {
  std::mt19937 random(7);
  for (int trial = 0; trial < 60; ++trial) {
    const int64_t rows = 1 + random() % 100, cols = 1 + random() % 70;
    const std::vector<uint16_t> matrix = RandomBf16(rows * cols, random);
    std::vector<std::pair<int64_t, int64_t>> pieces;
    for (int64_t row = 0; row < rows;) {
      const int64_t count = std::min<int64_t>(rows - row, 1 + random() % 40);
      pieces.emplace_back(row, count);
      row += count;
    }
    std::shuffle(pieces.begin(), pieces.end(), random);

    const int64_t bytes = PackedMatrixBytes(rows, cols).count();
    std::vector<std::byte> packed(bytes, std::byte{0xa5});
    for (const auto& [row, count] : pieces) {
      PackRows(matrix.data() + row * cols, row, count, rows, cols, packed.data());
    }

    std::vector<float> unpacked(cols);
    for (int64_t row = 0; row < PanelCount(rows) * kPanelRows; ++row) {
      UnpackRow(packed.data(), row, cols, unpacked.data());
      for (int64_t k = 0; k < cols; ++k) {
        const uint32_t expected = row < rows ? matrix[row * cols + k] : 0;
        ASSERT_EQ(std::bit_cast<uint32_t>(unpacked[k]), expected << 16)
            << rows << "x" << cols << " at row " << row << ", column " << k;
      }
    }
  }
}

TEST(Packing, LineHoldsRowsSixteenApartInOneWord) {
  std::vector<uint16_t> matrix(64 * 3);
  for (size_t i = 0; i < matrix.size(); ++i) matrix[i] = static_cast<uint16_t>(i);
  std::vector<std::byte> packed(PackedMatrixBytes(64, 3).count());
  PackRows(matrix.data(), 0, 64, 64, 3, packed.data());
  const auto* words = reinterpret_cast<const uint32_t*>(packed.data());
  // Panel 1, input 2, word 5: rows 37 and 53.
  EXPECT_EQ(words[(3 + 2) * 16 + 5], uint32_t{37 * 3 + 2} | uint32_t{53 * 3 + 2} << 16);
}

}  // namespace
}  // namespace palimpsest
