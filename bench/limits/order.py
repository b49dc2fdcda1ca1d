#!/usr/bin/env python3
"""The order in which a Hopper GPU's tensor cores execute the products of two warpgroups, and the cost of other
instructions during products. The timing model (sass/docs/clocks.md) needs both, and neither is published.

    python bench/limits/order.py        # a second; --cubin FILE: compile alone, on any machine with NVRTC

Two warpgroups of one block issue a burst of eight products of 64 x N x 16 each, the second one some clocks later. If
products run in order of arrival, the first burst ends as if it were alone. If warpgroups alternate, that burst ends
later.
"""

from __future__ import annotations

import argparse
import ctypes as c
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from rig import nvrtc  # noqa: E402

BURST, REPEATED = 8, 4096  # see order.cuh
WIDTHS = (64, 96, 128)
PLACES = ("shared", "registers")
DELAYS = (0, 50, 150)
WARPS = (1, 2, 3)  # per scheduler, in addition to the MMA warp
STEPS = {  # operations on an accumulator and two other registers
    "fma of 3 registers": ("fma.rn.f32 %0, %0, %1, %2;", True),
    "fma of 1 register": ("fma.rn.f32 %0, %0, 0f3F800001, 0f3F000000;", False),
    "add of 2 registers": ("add.rn.f32 %0, %0, %1;", True),
    "max of 2 registers": ("max.f32 %0, %0, %1;", True),
    "exponential": ("ex2.approx.ftz.f32 %0, %0;", False),
    "score of a softmax": (  # fma, exponential, maximum, sum
        "{.reg .f32 t, u; fma.rn.f32 t, %0, %1, %2; ex2.approx.ftz.f32 t, t; max.f32 u, %0, %1; add.rn.f32 %0, t, u;}",
        True,
    ),
    "conversion of 2": ("{.reg .b32 t; cvt.rn.bf16x2.f32 t, %0, %1; mov.b32 %0, t;}", True),
}


class Args(c.Structure):
    _fields_ = [("to", c.c_void_p), ("delay", c.c_uint32), ("alone", c.c_uint32), ("zero", c.c_uint32)]


def entry(name: str, threads: int, body: str) -> str:
    signature = f"__launch_bounds__({threads}, 1) {name}(const __grid_constant__ OrderArgs a)"
    return f'extern "C" __global__ void {signature} {{ {body} }}\n'


def source() -> str:
    text = (HERE / "order.cuh").read_text().replace("#pragma once\n", "")
    text += f"static_assert(sizeof(OrderArgs) == {c.sizeof(Args)} && kBurst == {BURST} && kRepeated == {REPEATED});\n"
    for n in WIDTHS:
        for place in PLACES:
            registers = str(place == "registers").lower()
            text += entry(f"bursts_{n}_{place}", 256, f"bursts<{n}, {registers}>(a);")
    for k, (statement, others) in enumerate(STEPS.values()):
        operands = ', "f"(y), "f"(z)' if others else ""
        step = f'[](float& x, float y, float z) {{ asm volatile("{statement}" : "+f"(x) : {operands[2:]}); }}'
        for n, left in ((64, 0), (64, 1), (64, 2), (128, 1), (128, 2)):
            for groups in WARPS:
                body = f"beside<{n}, {left}>(a, {step});"
                text += entry(f"beside_{k}_{n}_{left}_{groups}", 128 * (groups + 1), body)
    return text


class Card:
    def __init__(self):
        import torch
        from rig import driver

        self.torch, self.driver = torch, driver
        self.cubin = nvrtc.compile(source(), "order.cu")
        self.to = torch.zeros(1024, dtype=torch.int64, device="cuda")

    def launch(self, name: str, threads: int, delay: int = 0, alone: bool = False) -> list[int]:
        args = Args(self.to.data_ptr(), delay, alone, 0)
        self.driver.Function(self.cubin, name, 80 * 1024).launch(1, threads, c.addressof(args))
        self.torch.cuda.synchronize()
        return self.to.tolist()


def show_bursts(card: Card) -> None:
    print(f"\nBursts of {BURST} products, N/2 clocks each; clocks from the first one's start. share: of what the first")
    print("burst could be held up by the second, what it is: 0 is first come, first served; 1 is in turn.")
    print(f"{'N':>4} {'left operand':<13}{'delay':>6}{'alone':>7}{'first ends':>12}{'second ends':>13}{'share':>7}")
    for n in WIDTHS:
        for place in PLACES:
            name = f"bursts_{n}_{place}"
            alone = card.launch(name, 256, alone=True)
            end = alone[2 * BURST - 1]
            for delay in DELAYS:
                found = card.launch(name, 256, delay)
                first, second = found[2 * BURST - 1], found[4 * BURST - 1]
                possible = max(1, min(end - delay, BURST * n // 2))
                share = (first - end) / possible
                print(f"{n:>4} {place:<13}{delay:>6}{end:>7}{first:>12}{second:>13}{share:>7.2f}")
                if delay == 0:
                    for title, at in (("alone", 0), ("first", 0), ("second", 2 * BURST)):
                        x = alone if title == "alone" else found
                        print(f"      {title}: issued {x[at : at + BURST]}, done {x[at + BURST : at + 2 * BURST]}")


def show_beside(card: Card) -> None:
    print("\nClocks of a scheduler that an instruction takes, its chains not waiting: beside no product, and beside")
    print("those of 64 x 64 and 64 x 128 with the left operand in shared memory (S) or registers (R). Behind the")
    print("stroke: clocks of such a product, 32 and 64 where nothing disturbs it. What is more beside R than beside")
    print("S is register ports.")
    kinds = (("none", 64, 0), ("64 S", 64, 1), ("64 R", 64, 2), ("128 S", 128, 1), ("128 R", 128, 2))
    print(f"{'':<20}{'warps':>6}" + "".join(f"{title:>14}" for title, _, _ in kinds))
    for k, title in enumerate(STEPS):
        for groups in WARPS:
            figures = []
            for _, n, left in kinds:
                clocks, products = card.launch(f"beside_{k}_{n}_{left}_{groups}", 128 * (groups + 1))[:2]
                each = f"{clocks / (REPEATED * groups):.2f}"
                figures.append(each + (f" / {clocks / max(1, products):.1f}" if left else ""))
            print(f"{title:<20}{groups:>6}" + "".join(f"{x:>14}" for x in figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cubin", type=pathlib.Path, metavar="FILE", help="write the machine code here, and stop")
    options = parser.parse_args()
    if options.cubin:
        options.cubin.write_bytes(nvrtc.compile(source(), "order.cu"))
        return
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise SystemExit("torch must find a Hopper GPU (compute capability 9.0): run this program on an H100 or H200")
    print(torch.cuda.get_device_name())
    card = Card()
    show_bursts(card)
    show_beside(card)


if __name__ == "__main__":
    main()
