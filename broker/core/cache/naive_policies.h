// The fallback policies written down anew, as plainly as their papers put them: lists that are
// searched from end to end. Tests compare the real ones with these.
#ifndef PALIMPSEST_BROKER_CORE_CACHE_NAIVE_POLICIES_H_
#define PALIMPSEST_BROKER_CORE_CACHE_NAIVE_POLICIES_H_

#include <algorithm>
#include <cstddef>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "broker/core/cache/eviction_policy.h"

namespace palimpsest::cache {

using Blocks = std::vector<BlockHandle>;  // the oldest first

inline bool Has(const Blocks& blocks, BlockHandle block) {
  return std::find(blocks.begin(), blocks.end(), block) != blocks.end();
}

inline bool Take(Blocks& blocks, BlockHandle block) {
  const bool had = Has(blocks, block);
  std::erase(blocks, block);
  return had;
}

class NaivePolicy : public EvictionPolicy {
 public:
  absl::string_view name() const override { return "naive"; }

  void OnRequest(const RequestInfo&, const Access& access) override {
    for (const BlockHandle block : access.path) Use(block);
  }
  void OnInsert(RequestId, BlockHandle block, BlockHandle) override { Insert(block); }
  void OnEvictable(BlockHandle block) override { evictable_.insert(block); }
  void OnPinned(BlockHandle block) override { evictable_.erase(block); }
  std::optional<BlockHandle> ChooseVictim(absl::Time, BlockHandle block, bool) override {
    return Victim(block);
  }
  void OnEvict(BlockHandle block) override {
    Evict(block);
    evictable_.erase(block);
  }
  void OnForget(BlockHandle block) override { Forget(block); }

 protected:
  virtual void Use(BlockHandle block) = 0;
  virtual void Insert(BlockHandle block) = 0;
  virtual std::optional<BlockHandle> Victim(BlockHandle incoming) = 0;
  virtual void Evict(BlockHandle block) = 0;
  virtual void Forget(BlockHandle) {}

  std::optional<BlockHandle> First(const Blocks& blocks) const {
    for (const BlockHandle block : blocks) {
      if (evictable_.count(block) > 0) return block;
    }
    return std::nullopt;
  }
  std::optional<BlockHandle> First(const Blocks& blocks, const Blocks& others) const {
    const auto first = First(blocks);
    return first.has_value() ? first : First(others);
  }

  std::set<BlockHandle> evictable_;
};

// LRU, LFU and GDSF: the least value, then the one used longest ago.
class NaiveScores : public NaivePolicy {
 public:
  NaiveScores(bool count, bool inflate) : count_(count), inflate_(inflate) {}

 protected:
  void Use(BlockHandle block) override {
    if (!Take(used_, block)) return;
    used_.push_back(block);
    ++uses_[block];
    value_[block] = (count_ ? uses_[block] : 0) + (inflate_ ? floor_ : 0);
  }
  void Insert(BlockHandle block) override {
    used_.push_back(block);
    uses_[block] = 0;
    Use(block);
  }
  std::optional<BlockHandle> Victim(BlockHandle) override {
    std::optional<BlockHandle> least;
    for (const BlockHandle block : used_) {
      if (evictable_.count(block) == 0) continue;
      if (!least.has_value() || value_[block] < value_[*least]) least = block;
    }
    return least;
  }
  void Evict(BlockHandle block) override {
    floor_ = value_[block];
    Take(used_, block);
  }

 private:
  const bool count_, inflate_;
  Blocks used_;
  std::map<BlockHandle, int> uses_;
  std::map<BlockHandle, int> value_;
  int floor_ = 0;
};

// Megiddo, Modha 2003, figure 4: the ghost lists are cut before something goes, not after.
class NaiveArc : public NaivePolicy {
 public:
  explicit NaiveArc(size_t c) : c_(c) {}

 protected:
  void Use(BlockHandle block) override {
    const auto b1 = static_cast<double>(b1_.size()), b2 = static_cast<double>(b2_.size());
    if (Take(t1_, block) || Take(t2_, block)) {
      t2_.push_back(block);
    } else if (Has(b1_, block)) {
      p_ = std::min(static_cast<double>(c_), p_ + (b1 >= b2 ? 1 : b2 / b1));
    } else if (Has(b2_, block)) {
      p_ = std::max(0.0, p_ - (b2 >= b1 ? 1 : b1 / b2));
    }
  }
  void Insert(BlockHandle block) override {
    const bool ghost = Take(b1_, block) || Take(b2_, block);
    (ghost ? t2_ : t1_).push_back(block);
    if (ghost) return;
    while (!b1_.empty() && t1_.size() + b1_.size() > c_) b1_.erase(b1_.begin());
    while (!b2_.empty() && t1_.size() + b1_.size() + t2_.size() + b2_.size() > 2 * c_) {
      b2_.erase(b2_.begin());
    }
  }
  std::optional<BlockHandle> Victim(BlockHandle incoming) override {
    const auto t1 = static_cast<double>(t1_.size());
    if (!t1_.empty() && (t1 > p_ || (Has(b2_, incoming) && t1 == p_))) return First(t1_, t2_);
    return First(t2_, t1_);
  }
  void Evict(BlockHandle block) override {
    if (Take(t1_, block)) {
      b1_.push_back(block);
    } else if (Take(t2_, block)) {
      b2_.push_back(block);
    }
  }
  void Forget(BlockHandle block) override {
    Take(b1_, block);
    Take(b2_, block);
  }

 private:
  const size_t c_;
  double p_ = 0;
  Blocks t1_, t2_, b1_, b2_;
};

// Yang et al. 2023, algorithm 1.
class NaiveS3Fifo : public NaivePolicy {
 public:
  explicit NaiveS3Fifo(size_t c) : c_(c) {}

 protected:
  void Use(BlockHandle block) override {
    if (Has(s_, block) || Has(m_, block)) frequency_[block] = std::min(frequency_[block] + 1, 3);
  }
  void Insert(BlockHandle block) override {
    (Take(g_, block) ? m_ : s_).push_back(block);
    frequency_[block] = 0;
  }
  std::optional<BlockHandle> Victim(BlockHandle) override {
    if (s_.size() >= std::max<size_t>(1, c_ / 10)) {
      while (const auto tail = First(s_)) {
        if (frequency_[*tail] <= 1) return tail;
        frequency_[*tail] = 0;
        Take(s_, *tail);
        m_.push_back(*tail);
      }
    }
    while (const auto tail = First(m_)) {
      if (frequency_[*tail] == 0) return tail;
      --frequency_[*tail];
      Take(m_, *tail);
      m_.push_back(*tail);
    }
    return First(s_);
  }
  void Evict(BlockHandle block) override {
    if (Take(s_, block)) g_.push_back(block);
    Take(m_, block);
    if (g_.size() > c_ - c_ / 10) g_.erase(g_.begin());
  }
  void Forget(BlockHandle block) override { Take(g_, block); }

 private:
  const size_t c_;
  Blocks s_, m_, g_;
  std::map<BlockHandle, int> frequency_;
};

// Einziger, Friedman, Manes 2017: 1 % window, 80 % of the rest protected, halving every 10 c uses.
class NaiveTinyLfu : public NaivePolicy {
 public:
  explicit NaiveTinyLfu(size_t c)
      : c_(c), window_size_(std::max<size_t>(1, c / 100)), main_size_(c - window_size_) {}

 protected:
  void Use(BlockHandle block) override {
    frequency_[block] = std::min(frequency_[block] + 1, 15);
    if (++uses_ % (10 * c_) == 0) {
      for (auto& [other, frequency] : frequency_) frequency /= 2;
    }
    if (Take(window_, block)) {
      window_.push_back(block);
    } else if (Take(probation_, block) || Take(protected_, block)) {
      protected_.push_back(block);
      const auto oldest = First(protected_);
      if (protected_.size() > main_size_ * 8 / 10 && oldest.has_value()) {
        Take(protected_, *oldest);
        probation_.push_back(*oldest);
      }
    }
  }
  void Insert(BlockHandle block) override {
    window_.push_back(block);
    for (auto oldest = First(window_); oldest.has_value() && window_.size() > window_size_;
         oldest = First(window_)) {
      Take(window_, *oldest);
      probation_.push_back(*oldest);
    }
  }
  std::optional<BlockHandle> Victim(BlockHandle) override {
    const auto victim = First(probation_, protected_), candidate = First(window_);
    if (!victim.has_value()) return candidate;
    if (window_.size() < window_size_ || !candidate.has_value()) return victim;
    return frequency_[*candidate] > frequency_[*victim] ? victim : candidate;
  }
  void Evict(BlockHandle block) override {
    Take(window_, block);
    Take(probation_, block);
    Take(protected_, block);
  }
  void Forget(BlockHandle block) override { frequency_.erase(block); }

 private:
  const size_t c_, window_size_, main_size_;
  size_t uses_ = 0;
  Blocks window_, probation_, protected_;
  std::map<BlockHandle, int> frequency_;
};

}  // namespace palimpsest::cache

#endif  // PALIMPSEST_BROKER_CORE_CACHE_NAIVE_POLICIES_H_
