// GoogleTest's header, precompiled for all tests, because reading it takes half of the compile time. The
// presets without TANDEM_UNITY read it in each file, so that a missing include is an error there.
