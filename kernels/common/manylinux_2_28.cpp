// What the C and C++ libraries got after glibc 2.28 and GCC 8, for wheels, which load where they are that old
// (LITEBOOST_WHEEL, manylinux_2_28). A program that is compiled against newer ones asks for the newest version of each
// name. These are the names of ours that are new or have a new version since. Defined here and hidden, they are what
// this library's own calls are linked to; each does what it did, by names that are old.
//
// `build_support/wheels.py` has auditwheel look at what a library asks for: another name that is too new stops it there.
#include <pthread.h>
#include <sys/stat.h>

#include <exception>
#include <new>
#include <sstream>
#include <string>

// The version in which the C library of this processor began, and the layout of `struct stat` (_STAT_VER).
#if defined(__x86_64__)
#define LB_FIRST_GLIBC "GLIBC_2.2.5"
#define LB_STAT_VERSION 1
#elif defined(__aarch64__)
#define LB_FIRST_GLIBC "GLIBC_2.17"
#define LB_STAT_VERSION 0
#else
#error "wheels are for x86-64 and aarch64"
#endif

// lb_NAME is what NAME was in the first version of the C library.
#define LB_FIRST(name) __asm__(".symver lb_" #name ", " #name "@" LB_FIRST_GLIBC)
#define LB_HIDDEN __attribute__((visibility("hidden")))

extern "C" {

// Those of libpthread, libdl and librt went into libc in 2.34, under new versions.
int lb_pthread_create(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
int lb_pthread_join(pthread_t, void**);
void* lb_dlsym(void*, const char*);
int lb_shm_open(const char*, int, mode_t);
int lb_shm_unlink(const char*);
// fstat was an inline call of this until 2.33.
int lb___fxstat(int, int, struct stat*);
LB_FIRST(pthread_create);
LB_FIRST(pthread_join);
LB_FIRST(dlsym);
LB_FIRST(shm_open);
LB_FIRST(shm_unlink);
LB_FIRST(__fxstat);

LB_HIDDEN int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*),
                             void* argument) noexcept {
  return lb_pthread_create(thread, attributes, start, argument);
}

LB_HIDDEN int pthread_join(pthread_t thread, void** result) { return lb_pthread_join(thread, result); }

LB_HIDDEN void* dlsym(void* handle, const char* name) noexcept { return lb_dlsym(handle, name); }

LB_HIDDEN int shm_open(const char* name, int flags, mode_t mode) { return lb_shm_open(name, flags, mode); }

LB_HIDDEN int shm_unlink(const char* name) { return lb_shm_unlink(name); }

LB_HIDDEN int fstat(int file, struct stat* found) noexcept {
  return lb___fxstat(LB_STAT_VERSION, file, found);
}

// Read by std::shared_ptr since 2.32: false says that there may be threads, which is always safe.
LB_HIDDEN char __libc_single_threaded = 0;

}  // extern "C"

// Names of C++ as the compiler writes them: a name that is old is declared, one that is new defined.
#define LB_OLD(name) __asm__(name)
#define LB_NEW(name) __asm__(name) LB_HIDDEN

namespace old {

using std::exception_ptr;
using std::ostringstream;
using std::string;
using std::stringbuf;

void construct(ostringstream*, std::ios_base::openmode)
    LB_OLD("_ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1ESt13_Ios_Openmode");
string text_of(const stringbuf*) LB_OLD("_ZNKSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv");
void set_text(stringbuf*, const string&)
    LB_OLD("_ZNSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strERKNS_12basic_stringIcS2_S3_EE");
void copy(exception_ptr*, const exception_ptr*) LB_OLD("_ZNSt15__exception_ptr13exception_ptrC1ERKS0_");
void destroy(exception_ptr*) LB_OLD("_ZNSt15__exception_ptr13exception_ptrD1Ev");

}  // namespace old

using namespace old;

// The constructor without arguments has been in the library since GCC 9.
void lb_construct(ostringstream*) LB_NEW("_ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev");
void lb_construct(ostringstream* stream) { construct(stream, std::ios_base::out); }

// C++20 has two more of `str`, since GCC 11: of what is no temporary, and of what is, which is empty behind it.
string lb_text_of(const stringbuf*)
    LB_NEW("_ZNKRSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv");
string lb_text_of(const stringbuf* buffer) { return text_of(buffer); }

string lb_take_text(stringbuf*) LB_NEW("_ZNOSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv");
string lb_take_text(stringbuf* buffer) {
  string text = text_of(buffer);
  set_text(buffer, string());
  return text;
}

// Copies and destructors of exception_ptr are inline since GCC 12, and call these, which count its owners.
void lb_add_owner(exception_ptr*) LB_NEW("_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv");
void lb_add_owner(exception_ptr* self) {
  alignas(exception_ptr) char another[sizeof(exception_ptr)];
  copy(reinterpret_cast<exception_ptr*>(another), self);  // and never destroyed
}

void lb_remove_owner(exception_ptr*) LB_NEW("_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");
void lb_remove_owner(exception_ptr* self) { destroy(self); }

// Since GCC 11.
[[noreturn]] void lb_throw_length() LB_NEW("_ZSt28__throw_bad_array_new_lengthv");
[[noreturn]] void lb_throw_length() { throw std::bad_array_new_length(); }
