package command

import (
	"context"
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"culvert.dev/internal/gateway"
	"culvert.dev/registry/file"
)

// What a shell offers comes from a running gateway, or from the file that is
// named. It comes soon, or not at all.
const (
	completeTime = time.Second
	mostOffered  = 1000
)

// completeNames returns the names of services, unless one is given.
func completeNames(ctx context.Context, admin, config string, given []string) ([]string, cobra.ShellCompDirective) {
	if len(given) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var words []string
	if config != "" {
		if c, err := file.Load(config); err == nil {
			for _, s := range c.Services {
				words = append(words, s.Name)
			}
		}
		return proposals(words)
	}
	ctx, cancel := context.WithTimeout(ctx, completeTime)
	defer cancel()
	c, err := askedGateway(admin)
	if err != nil {
		return proposals(nil)
	}
	body, err := c.do(ctx, http.MethodGet, "/registry", nil)
	if err != nil {
		return proposals(nil)
	}
	defer body.Close()
	for dec := json.NewDecoder(body); len(words) < mostOffered; {
		var e gateway.RegistryEvent
		if dec.Decode(&e) != nil {
			break
		}
		if e.Service != nil {
			words = append(words, e.Service.Name)
		}
	}
	return proposals(words)
}

// completeListeners returns the addresses of listeners.
func completeListeners(ctx context.Context, admin, config string) ([]string, cobra.ShellCompDirective) {
	var words []string
	if config != "" {
		if c, err := file.Load(config); err == nil {
			for _, l := range c.Listeners {
				words = append(words, l.Address)
			}
		}
		return proposals(words)
	}
	ctx, cancel := context.WithTimeout(ctx, completeTime)
	defer cancel()
	if c, err := askedGateway(admin); err == nil {
		if s, err := c.status(ctx); err == nil {
			for _, l := range s.Listeners {
				words = append(words, l.Configured)
			}
			for _, l := range s.SourceListeners {
				words = append(words, l.Address)
			}
		}
	}
	return proposals(words)
}

// proposals are words without what a shell or a terminal would take for more.
func proposals(words []string) ([]string, cobra.ShellCompDirective) {
	words = slices.DeleteFunc(words, func(s string) bool { return s == "" || s != printable(s) || strings.ContainsAny(s, " \t") })
	slices.Sort(words)
	return slices.Compact(words), cobra.ShellCompDirectiveNoFileComp
}
