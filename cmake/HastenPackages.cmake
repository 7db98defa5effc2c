# cpack: a .tar.gz with everything, and two Debian packages. Both have LibTorch's CPU
# libraries and run on every Debian from the one on which they were built.
set(CPACK_PACKAGE_NAME hasten)
set(CPACK_PACKAGE_VENDOR "hasten")
set(CPACK_PACKAGE_CONTACT "maintainers of hasten <maintainers@hasten.invalid>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "${PROJECT_DESCRIPTION}")
set(CPACK_PACKAGE_DESCRIPTION "hasten adds Accelerate, Trainer, DDP, FSDP and Local SGD to \
LibTorch. It trains any C++ torch::nn::Module on one process or on many. LibTorch's CPU \
libraries are included.")
set(CPACK_RESOURCE_FILE_LICENSE "${PROJECT_SOURCE_DIR}/LICENSE")
set(CPACK_PACKAGE_FILE_NAME
  "hasten-${PROJECT_VERSION}-linux-${CMAKE_SYSTEM_PROCESSOR}")
set(CPACK_GENERATOR TGZ DEB)
set(CPACK_COMPONENTS_ALL runtime development)
set(CPACK_STRIP_FILES ON)
set(CPACK_PACKAGE_CHECKSUM SHA256)

set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_RUNTIME_PACKAGE_NAME hasten)
set(CPACK_DEBIAN_RUNTIME_PACKAGE_SHLIBDEPS ON)
# hasten loads libcurl and the OpenSSL that it needs when it fetches a model by name.
set(CPACK_DEBIAN_RUNTIME_PACKAGE_RECOMMENDS "libcurl4, ca-certificates")
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS "${LibTorch_LIB_DIR}")
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_NAME hasten-dev)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_DEPENDS
  "hasten (= ${PROJECT_VERSION}), nlohmann-json3-dev")
# The static libraries need these.
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_RECOMMENDS
  "pkg-config, libsodium-dev, libutf8proc-dev, libonig-dev, libxxhash-dev, zlib1g-dev")
set(CPACK_COMPONENT_RUNTIME_DESCRIPTION "${CPACK_PACKAGE_DESCRIPTION}")
set(CPACK_COMPONENT_DEVELOPMENT_DESCRIPTION "Headers, static libraries, CMake and pkg-config \
files, documentation and examples of hasten, and the headers of LibTorch.")
set(CPACK_DEBIAN_COMPRESSION_TYPE zstd)
set(CPACK_THREADS 0)
# A Debian package has its licence under this name.
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DATADIR}/doc/hasten-dev"
  RENAME copyright ${HASTEN_DEVELOPMENT})
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DOCDIR}"
  RENAME copyright ${HASTEN_RUNTIME})
include(CPack)
