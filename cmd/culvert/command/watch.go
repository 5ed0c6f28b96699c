package command

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"os/signal"
	"time"

	"github.com/spf13/cobra"
)

// A watchFlag has a command show what it shows again and again.
type watchFlag struct {
	every time.Duration // 0 means once
}

func (f *watchFlag) add(cmd *cobra.Command) {
	const usage = "refresh every 2 s, or every `DURATION` with --watch=DURATION, until interrupted"
	cmd.Flags().DurationVarP(&f.every, "watch", "w", 0, usage)
	cmd.Flags().Lookup("watch").NoOptDefVal = "2s"
}

// leastWatch is how often a gateway is asked at most.
const leastWatch = 100 * time.Millisecond

// run has show write to w, once or again and again. On a terminal each time
// takes the place of the one before; elsewhere they stand below each other.
func (f *watchFlag) run(ctx context.Context, w io.Writer, output string, show func(context.Context, io.Writer) error) error {
	switch {
	case f.every == 0:
		return show(ctx, w)
	case f.every < leastWatch:
		return usageError("write --watch=2s, or --watch alone", "--watch %v: want %v or more", f.every, leastWatch)
	case output != "text":
		return usageError("remove --watch", "--watch cannot be combined with -o %s", output)
	}
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt)
	defer stop()
	tick := time.NewTicker(f.every)
	defer tick.Stop()
	for first := true; ; first = false {
		var b bytes.Buffer
		b.WriteRune(markClear)
		if !first {
			b.WriteByte('\n')
		}
		err := show(ctx, &b)
		if ctx.Err() != nil {
			return nil // interrupted
		}
		if err != nil && !errors.Is(err, errSilent) {
			return err
		}
		if _, err := w.Write(b.Bytes()); err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}
