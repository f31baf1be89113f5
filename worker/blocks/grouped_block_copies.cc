// How a GroupedBlockStore takes blocks apart and puts them together, on a thread of its own.
#include <algorithm>
#include <utility>

#include "common/block_checksum.h"
#include "worker/blocks/grouped_block_store.h"

namespace palimpsest {

void GroupedBlockStore::Start() {
  thread_ = std::thread([this] {
    while (true) {
      {
        MutexLock lock(&mu_);
        while (!stopping_ && loads_.empty() && stores_.empty()) changed_.Wait(&mu_);
        if (stopping_) return;
      }
      CopyOne();
    }
  });
}

void GroupedBlockStore::Stop() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
    changed_.SignalAll();
  }
  if (thread_.joinable()) thread_.join();
}

GroupedBlockStore::Counters GroupedBlockStore::counters() const {
  MutexLock lock(&mu_);
  return counters_;
}

void GroupedBlockStore::Push(Job job) {
  MutexLock lock(&mu_);
  std::deque<Job>& queue = job.load.has_value() ? loads_ : stores_;
  queue.push_back(std::move(job));
  changed_.SignalAll();
}

void GroupedBlockStore::TakeApart(Staged& block) {
  for (Part& part : block.parts) {
    parts_.Take(At(block.slot), part.group, part.place.memory);
    part.checksum =
        BlockChecksum(HeadParts::KeyOf(block.key, part.group),
                      {part.place.memory, static_cast<size_t>(parts_.part_bytes().count())});
  }
}

bool GroupedBlockStore::PutTogether(const Staged& block, std::byte* scratch) {
  const auto size = static_cast<size_t>(parts_.part_bytes().count());
  for (const Part& part : block.parts) {
    // Checked where nobody else writes.
    std::copy_n(part.place.memory, size, scratch);
    if (BlockChecksum(HeadParts::KeyOf(block.key, part.group), {scratch, size}) != part.checksum) {
      return false;
    }
    parts_.Put(scratch, part.group, At(block.slot));
  }
  return true;
}

bool GroupedBlockStore::CopyOne() {
  Job job;
  bool is_load = false;
  {
    MutexLock lock(&mu_);
    is_load = !loads_.empty();
    std::deque<Job>& queue = is_load ? loads_ : stores_;
    if (queue.empty()) return false;
    job = std::move(queue.front());
    queue.pop_front();
  }
  Counters counted;
  const auto parts = static_cast<int64_t>(groups());
  const auto scratch =
      std::make_unique_for_overwrite<std::byte[]>(static_cast<size_t>(parts_.part_bytes().count()));
  for (Staged& block : job.blocks) {
    if (!is_load) {
      TakeApart(block);
      counted.stored += static_cast<int64_t>(block.parts.size());
    } else if (PutTogether(block, scratch.get())) {
      const auto size = static_cast<size_t>(parts_.block_bytes().count());
      job.load->blocks.push_back({.place = {.memory = At(block.slot)},
                                  .checksum = BlockChecksum(block.key, {At(block.slot), size})});
      counted.loaded += parts;
    } else {
      ++counted.corrupt;
      break;
    }
  }
  std::function<void()> wakeup;
  {
    MutexLock lock(&mu_);
    done_.push_back(std::move(job));
    counters_.stored += counted.stored;
    counters_.loaded += counted.loaded;
    counters_.corrupt += counted.corrupt;
    wakeup = wakeup_;
    waking_ = true;
  }
  if (wakeup != nullptr) wakeup();
  MutexLock lock(&mu_);
  waking_ = false;
  changed_.SignalAll();
  return true;
}

}  // namespace palimpsest
