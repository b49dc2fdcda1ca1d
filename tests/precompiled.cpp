// GoogleTest's header, precompiled for all tests, because reading it is half of what a test file takes. The presets
// without TANDEM_UNITY read it in each file, so that a test file that includes too little does not compile there.
