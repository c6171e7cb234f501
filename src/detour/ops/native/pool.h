// Sharing a kernel's work among threads, made for cores that other processes use too.
#pragma once
#include <cstdint>

namespace pool {

// Calls call(context, i) for each i in [0, count), on up to `threads` threads, and returns when all are
// done. The caller works too and waits only for pieces that somebody has begun: a helper that the
// operating system does not let run costs nothing, where a barrier would wait for its turn.
void run(int64_t count, int threads, void (*call)(void*, int64_t), void* context);

template <class Use>
inline void share(int64_t count, int threads, Use use) {
  run(count, threads, [](void* context, int64_t i) { (*(Use*)context)(i); }, &use);
}

// Pieces worth making of `work` floating-point operations or moved numbers: none below some ten
// microseconds, few more than it takes to even out the threads.
inline int64_t pieces(double work, int64_t most, int threads) {
  const int64_t wanted = (int64_t)(work / 400000), limit = 8 * (int64_t)threads;
  const int64_t count = wanted < limit ? wanted : limit;
  return threads == 1 || count <= 1 || most <= 1 ? 1 : count < most ? count : most;
}

// Rows [0, rows) in consecutive pieces: use(first, last).
template <class Use>
inline void share_rows(int64_t rows, double work_of_row, int threads, Use use) {
  const int64_t count = pieces(work_of_row * rows, rows, threads);
  share(count, threads, [&](int64_t i) { use(rows * i / count, rows * (i + 1) / count); });
}

}  // namespace pool
