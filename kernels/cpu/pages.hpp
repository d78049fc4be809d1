// Large pages for what a step reads whole: with pages of 4 KiB it waits for address translation.
#pragma once

#include <cstddef>
#include <functional>

namespace llmctl::cpu {

constexpr std::size_t kLargePage = std::size_t{2} << 20;  // x86-64, and ARM with base pages of 4 KiB

// Asks that these mapped bytes be read and mapped in large pages; false where the system knows none.
bool ask_for_large_pages(char* data, std::size_t bytes);

// Copies a read-only mapping into anonymous memory on large pages, which then takes its place at its address: whoever
// reads it, meanwhile too, sees no difference. What was copied is unmapped piece by piece, so that no more memory is
// taken than `bytes`. `go_on` is asked between pieces. Returns 0, or errno with everything as before (ECANCELED if
// `go_on` said no). `data` is the start of a page.
int move_to_large_pages(char* data, std::size_t bytes, const std::function<bool()>& go_on);

}  // namespace llmctl::cpu
