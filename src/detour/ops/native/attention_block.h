// What kernels that attend to one block of positions share.
#pragma once

namespace {

constexpr int BLOCK = 32;  // positions at a time

// The running softmax of one query head of one token.
struct Running {
  float highest, total;
};

}  // namespace
