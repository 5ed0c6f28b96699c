package command

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"culvert.dev/internal/gateway"
)

// signals returns a context that the first SIGINT or SIGTERM ends, and a
// channel that the second one closes. stop gives the signals back.
func signals(parent context.Context) (ctx context.Context, stop func(), now <-chan struct{}) {
	ctx, cancel := context.WithCancelCause(parent)
	second := make(chan struct{})
	got := make(chan os.Signal, 2)
	signal.Notify(got, os.Interrupt, syscall.SIGTERM)
	quit := make(chan struct{})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for n := 0; n < 2; n++ {
			select {
			case s := <-got:
				switch {
				case n == 0 && s == os.Interrupt:
					cancel(gateway.ErrInterrupted)
				case n == 0:
					cancel(nil)
				default:
					close(second)
				}
			case <-quit:
				return
			}
		}
	}()
	return ctx, func() {
		signal.Stop(got)
		close(quit)
		<-ended
		cancel(nil)
	}, second
}
