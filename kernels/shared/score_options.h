// What a kernel of any pass may do to scores before the softmax.
#pragma once

enum class Bias { none, boolean, f32, element };  // element: of the type of q
