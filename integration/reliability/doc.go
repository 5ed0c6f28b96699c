// Package reliability holds the gateway to its promises: the real program,
// built once and started with "culvert gateway --config FILE" on loopback,
// under the load, the faults and the hostile clients that each promise names.
//
// Both ways in are tested alike: by the name in a ClientHello and by CONNECT.
// Every gateway runs with the default limits, because that is what people run;
// the few tests that set one say why (a limit of a minute is tested as one of
// a second, a limit on descriptors as 256 of them). The log is JSON, so that
// tests can read it, and has the default level.
//
// The defaults limit what one source may do, and on loopback every client
// would be the same source. Clients that stand for many therefore connect from
// many addresses of 127.0.0.0/8, and each gateway listens at an address of its
// own in that range.
//
// Figures (bytes of a tunnel, times of a reload) are printed with -v and
// asserted where they are a promise. The tests need Linux: what the kernel
// knows of the program under test is read from /proc.
package reliability
