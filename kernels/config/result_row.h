// The coordinates of a result's row (a query and head) by its number.
#pragma once
#include "config/host_device.h"

// The n-th row of a result: heads are contiguous, then rows, then sequences.
struct ResultRow {
  int head;
  long long row, batch;

  TANDEM_HOST_DEVICE ResultRow(long long n, long long rows, int heads) {
    if ((n | rows) >> 32 == 0) {  // a division of 64 bits takes five times as many instructions
      divide(static_cast<unsigned>(n), static_cast<unsigned>(rows), static_cast<unsigned>(heads));
    } else {
      divide(n, rows, static_cast<long long>(heads));
    }
  }

 private:
  template <class Integer>
  TANDEM_HOST_DEVICE void divide(Integer n, Integer rows, Integer heads) {
    const Integer of_all = n / heads, sequence = of_all / rows;
    head = static_cast<int>(n - of_all * heads);
    row = of_all - sequence * rows;
    batch = sequence;
  }
};
