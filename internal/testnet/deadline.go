package testnet

import "time"

// Deadline returns how long a test waits for what the program does within d:
// d itself where tests measure, and ten times d elsewhere. A busy machine is
// not that late, and a program that waits for the wrong event is later.
func Deadline(d time.Duration) time.Duration {
	if Measuring {
		return d
	}
	return 10 * d
}
