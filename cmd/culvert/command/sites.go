package command

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"culvert.dev/registry/peer/join"
)

func newInvite() *cobra.Command {
	var o adminOptions
	var zones []string
	var ttl time.Duration
	cmd := &cobra.Command{
		Use:   "invite",
		Short: "Make a token by which another site joins this one as a peer",
		Long: `Invite has a running gateway make a token, and prints it. Give it to the
administrator of the other site, who runs culvert join. It works once, for one
site, until its time is over; the gateway keeps no more than a hash of it.

The other site may offer services with names of --zones, and no others. It sees
of this one what policies with the verb catalog allow.`,
		Example: `  culvert invite --zones '*.west.example' --ttl 1h --admin unix:/run/culvert/admin.sock`,
		Args:    args(0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if _, err := join.ParseZones(zones); err != nil {
				return usageError("", "--zones: %w", err)
			}
			answer, err := o.sites(cmd.Context(), "invite", url.Values{"zone": zones, "ttl": {ttl.String()}})
			if err != nil {
				return err
			}
			_, err = fmt.Fprintln(cmd.OutOrStdout(), answer["token"])
			return err
		},
	}
	o.add(cmd)
	cmd.Flags().StringSliceVar(&zones, "zones", nil, "names that the other site may offer: `*.west.example`; none if left out")
	cmd.Flags().DurationVar(&ttl, "ttl", time.Hour, "how long the token is valid; 720h at most")
	return cmd
}

func newJoin() *cobra.Command {
	var o adminOptions
	var zones []string
	cmd := &cobra.Command{
		Use:   "join -",
		Short: "Join another site as a peer, by a token on standard input",
		Long: `Join has a running gateway join another site, which has made the token with
culvert invite. The token is read from standard input, and never from an
argument, which other users of this machine could see.

The gateway verifies the other one by the token before it sends anything. Then
each side stores the other's name, trust bundle, zones and gateways.

The other site may offer services with names of --zones, and no others. It sees
of this one what policies with the verb catalog allow.`,
		Example: `  culvert join --zones '*.east.example' --admin unix:/run/culvert/admin.sock - < token`,
		Args:    args(1, "- for standard input"),
		RunE: func(cmd *cobra.Command, a []string) error {
			if a[0] != "-" {
				return usageError("write culvert join -, and give the token on standard input", "a token is never an argument: other users of this machine could see it")
			}
			if _, err := join.ParseZones(zones); err != nil {
				return usageError("", "--zones: %w", err)
			}
			text, err := io.ReadAll(io.LimitReader(cmd.InOrStdin(), 64<<10))
			if err != nil {
				return err
			}
			token := strings.TrimSpace(string(text))
			if err := join.CheckToken(token); err != nil {
				return &cliError{err: err, hint: "ask the other site for a token of \"culvert invite\", and copy all of it", code: exitFailed}
			}
			answer, err := o.sites(cmd.Context(), "join", url.Values{"zone": zones, "token": {token}})
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "joined %s\n", printable(answer["peer"]))
			return err
		},
	}
	o.add(cmd)
	cmd.Flags().StringSliceVar(&zones, "zones", nil, "names that the other site may offer: `*.east.example`; none if left out")
	return cmd
}

func newPeersRemove(o *adminOptions) *cobra.Command {
	return &cobra.Command{
		Use:   "remove NAME",
		Short: "Forget a site that has joined by a token: its trust and its names",
		Long: `Remove has a running gateway forget a site that has joined by a token. Its names
are no longer served, its gateways are no longer trusted, and their tunnels end
with the reason revoked. The other site is not told: remove this one there.`,
		Example: `  culvert peers remove west --admin unix:/run/culvert/admin.sock`,
		Args:    args(1, "one NAME"),
		RunE: func(cmd *cobra.Command, a []string) error {
			answer, err := o.sites(cmd.Context(), "remove", url.Values{"name": {a[0]}})
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "removed %s\n", printable(answer["peer"]))
			return err
		},
	}
}

// sites asks the gateway for something that concerns other sites.
func (o *adminOptions) sites(ctx context.Context, what string, q url.Values) (map[string]string, error) {
	c, err := o.client()
	if err != nil {
		return nil, err
	}
	body, err := c.post(ctx, "/sites/"+what, q)
	if err != nil {
		return nil, err
	}
	defer body.Close()
	var answer map[string]string
	if err := json.NewDecoder(body).Decode(&answer); err != nil {
		return nil, fmt.Errorf("the gateway's answer: %w", err)
	}
	return answer, nil
}
