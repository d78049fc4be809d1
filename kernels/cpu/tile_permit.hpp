// Whether this process may use AMX.
#pragma once

namespace llmctl::cpu {

// Whether the CPU has AMX for int8, and Linux gives this process the room for its registers, which must be asked for
// (arch_prctl, ARCH_REQ_XCOMP_PERM) and is refused where the signal stack is too small for them.
bool may_use_amx();

}  // namespace llmctl::cpu
