// GoogleTest's header, precompiled for all tests of a sanitized build, because reading it takes half of the compile
// time. In other builds each test reads it, so that a missing include is an error there.
