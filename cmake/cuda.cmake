# Decides whether CUDA kernels are built, and how.
set(VEGAS_HAVE_CUDA OFF)
if(NOT VEGAS_CUDA STREQUAL "OFF")
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 80-real)  # for the compiler check alone; targets name their own
  endif()
  if(NOT CMAKE_CUDA_COMPILER)
    unset(CMAKE_CUDA_COMPILER CACHE)  # not found last time: look again
  endif()
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    set(VEGAS_HAVE_CUDA ON)
  elseif(VEGAS_CUDA STREQUAL "ON")
    message(FATAL_ERROR "VEGAS_CUDA=ON, but nvcc was not found: put it on PATH or set CUDACXX")
  endif()
endif()
if(VEGAS_HAVE_CUDA AND NOT EXISTS "${VEGAS_CUTLASS_DIR}/cutlass/cutlass.h")
  message(FATAL_ERROR "CUDA kernels need the CUTLASS headers: pip install --no-deps nvidia-cutlass==4.2.0.0, "
                      "or set VEGAS_CUTLASS_DIR to a folder that holds cutlass/ and cute/, or VEGAS_CUDA=OFF")
endif()

# Adds .cu files to a library as the object library `objects`, compiled for the architectures after ARCHITECTURES.
function(vegas_add_cuda_objects library objects)
  cmake_parse_arguments(PARSE_ARGV 2 given "" "" "ARCHITECTURES;SOURCES")
  list(TRANSFORM given_ARCHITECTURES APPEND "-real")
  add_library(${objects} OBJECT ${given_SOURCES})
  target_include_directories(${objects} PRIVATE csrc csrc/include)
  target_include_directories(${objects} SYSTEM PRIVATE "${VEGAS_CUTLASS_DIR}")
  target_compile_definitions(${objects} PRIVATE VEGAS_WITH_CUDA)
  # Kernels compress to a quarter; any driver for CUDA 13 unpacks them.
  target_compile_options(${objects} PRIVATE --expt-relaxed-constexpr
    $<$<VERSION_GREATER_EQUAL:${CMAKE_CUDA_COMPILER_VERSION},13.0>:--compress-mode=size>)
  set_target_properties(${objects} PROPERTIES CUDA_ARCHITECTURES "${given_ARCHITECTURES}")
  target_link_libraries(${library} PRIVATE ${objects})
endfunction()

# Adds the portable kernels, for every architecture of VEGAS_CUDA_ARCHITECTURES, and where 90 is one of them the
# Hopper kernels, whose instructions exist in 90a only.
function(vegas_add_cuda_kernels library)
  cmake_parse_arguments(PARSE_ARGV 1 given "" "" "PORTABLE;HOPPER;HOST")
  vegas_add_cuda_objects(${library} ${library}_portable
    ARCHITECTURES ${VEGAS_CUDA_ARCHITECTURES} SOURCES ${given_PORTABLE})
  target_sources(${library} PRIVATE ${given_HOST})
  if("90" IN_LIST VEGAS_CUDA_ARCHITECTURES)
    vegas_add_cuda_objects(${library} ${library}_hopper ARCHITECTURES 90a SOURCES ${given_HOPPER})
    foreach(part ${library} ${library}_portable ${library}_hopper)
      target_compile_definitions(${part} PRIVATE VEGAS_WITH_HOPPER)
    endforeach()
  endif()
  list(JOIN VEGAS_CUDA_ARCHITECTURES " " listed)
  target_compile_definitions(${library} PRIVATE VEGAS_WITH_CUDA "VEGAS_CUDA_ARCHITECTURES=\"${listed}\"")
  set_target_properties(${library} PROPERTIES LINKER_LANGUAGE CUDA CUDA_RUNTIME_LIBRARY Static
    CUDA_ARCHITECTURES 80-real)
endfunction()
