// A few threads that carry out tasks in the order in which they came, those that are urgent first.
//
// Thread-safe. Whoever pushes bounds how many tasks there are.
#ifndef PALIMPSEST_COMMON_TASK_QUEUE_H_
#define PALIMPSEST_COMMON_TASK_QUEUE_H_

#include <deque>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "common/mutex.h"

namespace palimpsest {

class TaskQueue {
 public:
  using Task = absl::AnyInvocable<void()>;

  explicit TaskQueue(int threads) {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Run(); });
  }
  ~TaskQueue() { Stop(); }
  TaskQueue(const TaskQueue&) = delete;
  TaskQueue& operator=(const TaskQueue&) = delete;

  // Dropped once Stop was called.
  void Push(Task task, bool urgent = false) {
    MutexLock lock(&mu_);
    if (stopping_) return;
    (urgent ? urgent_ : tasks_).push_back(std::move(task));
    changed_.Signal();
  }

  // Returns when the tasks that have begun have ended; the others are dropped. Idempotent.
  void Stop() {
    {
      MutexLock lock(&mu_);
      stopping_ = true;
      changed_.SignalAll();
    }
    for (std::thread& thread : threads_) {
      if (thread.joinable()) thread.join();
    }
    std::deque<Task> dropped;
    std::deque<Task> dropped_urgent;
    MutexLock lock(&mu_);
    dropped.swap(tasks_);
    dropped_urgent.swap(urgent_);
  }

 private:
  void Run() {
    while (true) {
      Task task;
      {
        MutexLock lock(&mu_);
        while (!stopping_ && urgent_.empty() && tasks_.empty()) changed_.Wait(&mu_);
        if (stopping_) return;
        std::deque<Task>& from = urgent_.empty() ? tasks_ : urgent_;
        task = std::move(from.front());
        from.pop_front();
      }
      task();
    }
  }

  Mutex mu_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::deque<Task> urgent_ ABSL_GUARDED_BY(mu_);
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mu_);
  std::vector<std::thread> threads_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_TASK_QUEUE_H_
