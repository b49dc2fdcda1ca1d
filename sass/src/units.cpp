#include "sass/src/units.h"

#include <algorithm>
#include <charconv>
#include <string>

namespace tandem::machine_code {
namespace {

constexpr std::string_view kNames[kUnits] = {"MMA",           "exponential",   "FMA",    "ALU",     "conversion",
                                             "tensor memory", "shared memory", "memory", "uniform", "control"};

// Opcodes up to their first dot, with a space on both sides.
constexpr struct {
  Unit unit;
  std::string_view opcodes;
} kOpcodes[] = {
    {Unit::mma, " HGMMA QGMMA IGMMA BGMMA HMMA IMMA QMMA OMMA DMMA UTCHMMA UTCQMMA UTCIMMA UTCOMMA UTCMXQMMA "},
    {Unit::exponential, " MUFU F2F F2I I2F FRND FCHK POPC FLO BREV "},
    {Unit::fma, " FFMA FADD FMUL FFMA2 FADD2 FMUL2 FFMA32I FADD32I FMUL32I FHFMA "},
    {Unit::fma, " FHADD HFMA2 HADD2 HMUL2 HFMA2_MMA IMAD IDP IDP4A FSWZADD "},
    {Unit::alu, " IADD3 IADD IADD2 IADD32I VIADD LEA LOP3 LOP PLOP3 SHF SHL "},
    {Unit::alu, " SHR PRMT SEL FSEL FSET FSETP ISETP FMNMX FMNMX3 VIMNMX VIMNMX3 "},
    {Unit::alu, " VIADDMNMX IMNMX VHMNMX HMNMX2 HSET2 HSETP2 IABS I2FP I2IP BMSK SGXT "},
    {Unit::alu, " MOV MOV32I P2R R2P LEPC VABSDIFF VABSDIFF4 SCALE XMAD FMNMX2 "},
    {Unit::conversion, " F2FP F2IP "},
    {Unit::tensor_memory, " LDTM STTM LDT STT UTCCP UTCSHIFT "},
    {Unit::shared_memory, " LDS STS LDSM STSM ATOMS SHFL STAS REDAS LDS_LDU "},
    {Unit::memory, " LD ST LDG STG LDL STL ATOM ATOMG RED REDG LDGSTS LDGDEPBAR CCTL "},
    {Unit::memory, " CCTLL CCTLT UTMALDG UTMASTG UTMAREDG UTMAPF UTMACCTL UTMACMDFLUSH UBLKCP UBLKPF UBLKRED MATCH "},
    {Unit::uniform, " R2UR S2UR CS2UR REDUX CREDUX UIADD3 UIADD UMOV ULEA ULOP3 ULOP UPLOP3 USHF USHL "},
    {Unit::uniform, " USHR USEL UISETP UIMAD UIMNMX UPRMT UFLO UPOPC UBREV UBMSK USGXT UP2UR UR2UP UI2I "},
    {Unit::uniform, " UFADD UFMUL UFFMA UFSEL UFSETP UFSET UFMNMX UI2F UF2F UF2FP UF2I UF2IP UI2FP UIABS "},
    {Unit::uniform, " UVIADD UVIMNMX UVIRTCOUNT USETSHMSZ UFRND UMEMSETS UREDGR USTGR VOTEU ULDC LDCU UGETNEXTWORKID "},
    {Unit::control, " BRA BRX BRXU JMP JMX JMXU CALL RET EXIT KILL BREAK BSSY BSYNC "},
    {Unit::control, " BMOV BPT NOP YIELD NANOSLEEP WARPSYNC RPCMOV VOTE ELECT SYNCS BAR DEPBAR MEMBAR "},
    {Unit::control,
     " FENCE ERRBAR WARPGROUP WARPGROUPSET UCGABAR_ARV UCGABAR_WAIT UTCBAR UTCATOMSWS USETMAXREG ACQBULK PREEXIT "
     "ENDCOLLECTIVE LDC "},
    {Unit::control, " CS2R S2R PMTRIG ARRIVES CGAERRBAR ACQSHMINIT GETLMEMBASE SETLMEMBASE LDGMC CLC UCLC "},
};

constexpr Rates kRates[] = {
    {.arch = "sm_90"},
    {.arch = "sm_100", .tensor_bytes = 228},
    {.arch = "sm_103", .exponentials = 32, .tensor_bytes = 228},
};

const Unit* find(const Instruction& i) {
  std::string padded(" ");
  padded.append(i.base()).append(" ");
  for (const auto& [unit, opcodes] : kOpcodes) {
    if (opcodes.find(padded) != std::string_view::npos) return &unit;
  }
  return nullptr;
}

// Returns the number at the end of a modifier with this prefix: 32 for "x32".
int number_after(const Instruction& i, std::string_view start) {
  size_t at = i.opcode.find('.');
  while (at != std::string::npos) {
    const size_t end = std::min(i.opcode.find('.', at + 1), i.opcode.size());
    const std::string_view modifier = std::string_view(i.opcode).substr(at + 1, end - at - 1);
    int value = 0;
    if (modifier.starts_with(start) &&
        std::from_chars(modifier.data() + start.size(), modifier.data() + modifier.size(), value).ec == std::errc())
      return value;
    at = end < i.opcode.size() ? end : std::string::npos;
  }
  return 0;
}

}  // namespace

std::string_view name_of(Unit unit) { return kNames[static_cast<size_t>(unit)]; }

Unit unit_of(const Instruction& i) {
  const Unit* unit = find(i);
  return unit == nullptr ? Unit::control : *unit;
}
bool known(const Instruction& i) { return find(i) != nullptr; }

const Rates* rates_of(std::string_view arch) {
  const size_t digits = arch.find_first_not_of("0123456789", 3);
  const std::string_view plain = arch.substr(0, digits);  // without the "a" of sm_90a
  const auto* found = std::ranges::find(kRates, plain, &Rates::arch);
  return found == std::end(kRates) ? nullptr : found;
}

double lanes_of(const Instruction& i) {
  const bool pair = i.base() == "FFMA2" || i.base() == "FADD2" || i.base() == "FMUL2";
  return pair ? 64 : 32;
}

double bytes_of(const Instruction& i) {
  constexpr double lanes = 32, word = 4;
  if (i.base() == "LDTM" || i.base() == "STTM") return lanes * word * std::max(1, number_after(i, "x"));
  if (i.base() == "LDSM" || i.base() == "STSM") {
    const bool four = i.opcode.ends_with(".4"), two = i.opcode.ends_with(".2");
    return lanes * word * (four ? 4 : two ? 2 : 1);
  }
  if (i.has("128")) return lanes * 16;
  return i.has("64") ? lanes * 8 : lanes * word;
}

bool is_bulk_store(const Instruction& i) {
  return i.base() == "UBLKRED" || i.base() == "UTMAREDG" || i.base() == "UTMASTG" || i.opcode.starts_with("UBLKCP.G");
}

bool writes_global(const Instruction& i) {
  constexpr std::string_view all[] = {"ST", "STG", "RED", "REDG", "ATOM", "ATOMG"};
  return is_bulk_store(i) || std::ranges::find(all, i.base()) != std::end(all);
}

bool is_product(const Instruction& i) { return unit_of(i) == Unit::mma; }
bool in_tensor_memory(const Instruction& product) { return product.base().starts_with("UTC"); }

int columns_of(const Instruction& product) { return number_after(product, "64x"); }

int depth_of(const Instruction& product) {
  if (const std::string columns = std::to_string(columns_of(product)); columns != "0")
    return number_after(product, "64x" + columns + "x");
  return product.base() == "UTCHMMA" ? 16 : 32;
}

bool begins_sum(const Instruction& product) {
  return std::ranges::find(product.operands, "!UPT") != product.operands.end();
}

// wgmma names one descriptor for both operands if its left operand is in shared memory. tcgen05 names a descriptor for
// each operand.
bool left_in_shared_memory(const Instruction& product) {
  const size_t left = in_tensor_memory(product) ? 0 : 1;
  return product.operands.size() > left && product.operands[left].starts_with("gdesc");
}

bool by_a_pair(const Instruction& product) { return product.has("2CTA"); }

}  // namespace tandem::machine_code
