// The helpers behind pool.h: threads that look for work a while, then sleep.
#include "pool.h"
#include <immintrin.h>
#include <sched.h>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace {

using Clock = std::chrono::steady_clock;

// Between two kernels of a step lie some ten microseconds, between two steps a millisecond.
constexpr auto AWAKE = std::chrono::microseconds(300);
constexpr int SPINS = 64;  // pauses before the core is offered to others

// One number says which job is out, how many pieces it has and which is the next to begin, so that
// taking a piece is one exchange that fails if the job has changed meanwhile.
constexpr int COUNT_BITS = 16;
constexpr uint64_t COUNT_MASK = (1u << COUNT_BITS) - 1;

struct Pool {
  std::atomic<uint64_t> ticket{0};  // job << 32 | count << 16 | next
  std::atomic<void (*)(void*, int64_t)> call{nullptr};
  std::atomic<void*> context{nullptr};
  std::atomic<int64_t> done{0};
  std::atomic<int> helpers_wanted{0};
  std::atomic<int> sleeping{0};
  std::mutex owner;  // of the one job that is out
  std::mutex sleep;
  std::condition_variable wake;
  int helpers = 0;
};

Pool& shared() {
  static Pool* pool = new Pool;  // never destroyed: its threads outlive main
  return *pool;
}

uint64_t count_of(uint64_t ticket) { return ticket >> COUNT_BITS & COUNT_MASK; }
uint64_t next_of(uint64_t ticket) { return ticket & COUNT_MASK; }

// Takes one piece of the job that is out and does it; false if there is none to take.
bool work(Pool& pool) {
  uint64_t ticket = pool.ticket.load(std::memory_order_acquire);
  while (next_of(ticket) < count_of(ticket)) {
    auto call = pool.call.load(std::memory_order_relaxed);
    void* context = pool.context.load(std::memory_order_relaxed);
    if (pool.ticket.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) {
      call(context, (int64_t)next_of(ticket));
      pool.done.fetch_add(1, std::memory_order_release);
      return true;
    }
  }
  return false;
}

void help(Pool& pool, int number) {
  auto idle_since = Clock::now();
  for (int spins = 0;; spins++) {
    if (number < pool.helpers_wanted.load(std::memory_order_relaxed) && work(pool)) {
      while (work(pool)) {
      }
      idle_since = Clock::now();
      spins = 0;
    } else if (spins < SPINS) {
      _mm_pause();
    } else if (Clock::now() - idle_since < AWAKE) {
      sched_yield();
    } else {
      std::unique_lock<std::mutex> lock(pool.sleep);
      pool.sleeping.fetch_add(1);
      pool.wake.wait(lock, [&] {
        const uint64_t ticket = pool.ticket.load();
        return number < pool.helpers_wanted.load() && next_of(ticket) < count_of(ticket);
      });
      pool.sleeping.fetch_sub(1);
      idle_since = Clock::now();
      spins = 0;
    }
  }
}

}  // namespace

namespace pool {

void run(int64_t count, int threads, void (*call)(void*, int64_t), void* context) {
  Pool& pool = shared();
  std::unique_lock<std::mutex> lock(pool.owner, std::defer_lock);
  if (threads <= 1 || count <= 1 || count > (int64_t)COUNT_MASK || !lock.try_lock()) {
    for (int64_t i = 0; i < count; i++) call(context, i);
    return;
  }
  for (; pool.helpers < threads - 1; pool.helpers++)
    std::thread(help, std::ref(pool), pool.helpers).detach();
  pool.helpers_wanted.store(threads - 1);
  pool.call.store(call, std::memory_order_relaxed);
  pool.context.store(context, std::memory_order_relaxed);
  pool.done.store(0, std::memory_order_relaxed);
  const uint64_t job = (pool.ticket.load() >> 2 * COUNT_BITS) + 1;
  pool.ticket.store(job << 2 * COUNT_BITS | (uint64_t)count << COUNT_BITS);
  if (pool.sleeping.load() > 0) {
    std::lock_guard<std::mutex> awake(pool.sleep);
    pool.wake.notify_all();
  }
  while (work(pool)) {
  }
  for (int spins = 0; pool.done.load(std::memory_order_acquire) < count; spins++)
    spins < 1024 ? _mm_pause() : (void)sched_yield();
}

}  // namespace pool
