// A fiber is a stack of its own: whoever switches to it runs there until it switches away.
#pragma once
#include <cstddef>
#include "emulator.h"

#if !defined(__x86_64__) && !defined(__aarch64__)
#include <ucontext.h>
#endif

namespace emulator {

#if defined(__x86_64__) || defined(__aarch64__)

// Pushes what a function call preserves, stores the stack pointer in *from, and goes on with the stack `to`.
extern "C" void emulator_switch(void** from, void* to);

#if defined(__x86_64__)
asm(R"(
.text
.hidden emulator_switch
.globl emulator_switch
.type emulator_switch, @function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch, .-emulator_switch
)");
constexpr size_t kSavedWords = 7;     // six registers, then the address to return to
constexpr size_t kReturnWord = 6;
constexpr size_t kWordsAboveFrame = 1;  // a function starts 8 bytes off the alignment of 16
#else
asm(R"(
.text
.hidden emulator_switch
.globl emulator_switch
.type emulator_switch, %function
emulator_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size emulator_switch, .-emulator_switch
)");
constexpr size_t kSavedWords = 20;
constexpr size_t kReturnWord = 11;  // x30
constexpr size_t kWordsAboveFrame = 0;
#endif

class Fiber {
 public:
  // The first switch to this fiber calls `entry`, which must not return.
  void start(u8* stack, size_t bytes, void (*entry)()) {
    void** const frame = reinterpret_cast<void**>(stack + bytes) - kWordsAboveFrame - kSavedWords;
    for (size_t i = 0; i < kSavedWords + kWordsAboveFrame; ++i) frame[i] = nullptr;
    frame[kReturnWord] = reinterpret_cast<void*>(entry);
    stack_pointer_ = frame;
  }
  void switch_to(Fiber& next) { emulator_switch(&stack_pointer_, next.stack_pointer_); }

 private:
  void* stack_pointer_ = nullptr;
};

#else  // any other processor: POSIX, with a system call or two a switch

class Fiber {
 public:
  void start(u8* stack, size_t bytes, void (*entry)()) {
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack;
    context_.uc_stack.ss_size = bytes;
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
  }
  void switch_to(Fiber& next) { swapcontext(&context_, &next.context_); }

 private:
  ucontext_t context_{};
};

#endif

}  // namespace emulator
