// What a kernel of any pass may do to scores before the softmax.
#pragma once

enum class Bias { none, boolean, f32, element };  // element: of the type of q

constexpr int bytes_of(Bias bias) {
  switch (bias) {
    case Bias::none: return 0;
    case Bias::boolean: return 1;
    case Bias::f32: return 4;
    case Bias::element: return 2;
  }
  return 0;
}
