package dns

import (
	"fmt"
	"log/slog"
	"runtime/debug"
)

// recovered logs a panic that its caller has recovered from, and makes an error
// of it. One bad question, or one bad answer to it, costs no other.
func recovered(log *slog.Logger, where string, v any) error {
	if log != nil {
		log.Error("panic in a DNS query", "in", where, "panic", v, "stack", string(debug.Stack()))
	}
	return fmt.Errorf("dns: panic in %s: %v", where, v)
}
