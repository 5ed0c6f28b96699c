//go:build !measure

package testnet

// Measuring reports whether tests hold the program to figures of time and of
// the processor. They do where they are built with the tag "measure", as by
// "make soak", on a machine that does nothing else.
const Measuring = false
