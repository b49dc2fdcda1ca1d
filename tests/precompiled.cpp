// GoogleTest's header, precompiled for all tests of a sanitized build, where reading it is half of what a test file
// takes. Other builds read it in each, so that a test file that includes too little does not compile there.
