# find_package(kvant) gives kvant::kvant, from the install tree.
include(CMakePackageConfigHelpers)
set(kvant_package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/kvant")

install(TARGETS kvant kvant_simt EXPORT kvantTargets FILE_SET HEADERS)
if(TARGET kvant_c)
  install(TARGETS kvant_c EXPORT kvantTargets FILE_SET HEADERS)
endif()
if(TARGET kvant_dnnl_graph)
  install(TARGETS kvant_dnnl_graph EXPORT kvantTargets)
endif()
if(TARGET kvant_cli)
  install(TARGETS kvant_cli)
endif()
install(EXPORT kvantTargets NAMESPACE kvant:: DESTINATION "${kvant_package_dir}")
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" "${PROJECT_SOURCE_DIR}/THIRD_PARTY_NOTICES.md"
        DESTINATION "${CMAKE_INSTALL_DOCDIR}")

configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/kvantConfig.cmake.in"
  "${PROJECT_BINARY_DIR}/kvantConfig.cmake" INSTALL_DESTINATION "${kvant_package_dir}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/kvantConfigVersion.cmake"
  COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/kvantConfig.cmake"
              "${PROJECT_BINARY_DIR}/kvantConfigVersion.cmake"
        DESTINATION "${kvant_package_dir}")
