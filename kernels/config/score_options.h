// Options that change scores before the softmax, in kernels of any pass.
#pragma once

enum class Bias { none, boolean, f32, element };  // element: the type of q

constexpr int bytes_of(Bias bias) {
  switch (bias) {
    case Bias::none: return 0;
    case Bias::boolean: return 1;
    case Bias::f32: return 4;
    case Bias::element: return 2;
  }
  return 0;
}
