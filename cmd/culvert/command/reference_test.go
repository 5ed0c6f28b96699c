package command

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

var update = flag.Bool("update", false, "write docs/reference/cli.md from the code")

// TestReference compares docs/reference/cli.md with the commands. "make docs"
// writes it.
func TestReference(t *testing.T) {
	var b strings.Builder
	b.WriteString(`# Command line

<!-- Written by "make docs". Change the code, not this page. -->

Every command has ` + "`--help`" + `. Exit codes: 0 for success; 1 for a failure, or for an answer that is no;
2 for a mistake in flags, arguments or a file, in which case nothing was started.

Commands that ask a running gateway take its admin port by ` + "`--admin`" + `. Without ` + "`--admin`" + ` and
` + "`--config`" + ` they ask at ` + "`$CULVERT_ADMIN`" + `, or at ` + "`/run/culvert/admin.sock`" + ` if that exists. Colors are used
on a terminal only; ` + "`NO_COLOR=1`" + ` or ` + "`TERM=dumb`" + ` turns them off.
`)
	root := New()
	root.InitDefaultCompletionCmd("completion")
	commandPage(&b, root)
	name := filepath.Join("..", "..", "..", "docs", "reference", "cli.md")
	if *update {
		if err := os.WriteFile(name, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if page, err := os.ReadFile(name); err != nil || string(page) != b.String() {
		t.Errorf("docs/reference/cli.md differs from the commands (%v): run \"make docs\" and commit the page", err)
	}
}

// commandPage writes the section of a command, and those of its subcommands.
func commandPage(b *strings.Builder, cmd *cobra.Command) {
	if cmd.Hidden || cmd.Name() == "help" {
		return
	}
	cmd.InitDefaultHelpFlag()
	fmt.Fprintf(b, "\n## %s\n\n", cmd.CommandPath())
	if cmd.Long != "" {
		b.WriteString(strings.TrimSpace(cmd.Long) + "\n")
	} else {
		b.WriteString(cmd.Short + ".\n")
	}
	if cmd.Runnable() && !cmd.HasSubCommands() {
		fmt.Fprintf(b, "\n```\n%s\n```\n", cmd.UseLine())
	}
	if cmd.HasSubCommands() && cmd.Name() != "completion" {
		b.WriteString("\n| command | |\n| --- | --- |\n")
		for _, sub := range cmd.Commands() {
			if !sub.Hidden && sub.Name() != "help" && cmd.Name() != "completion" {
				fmt.Fprintf(b, "| [%s](#%s) | %s |\n", sub.CommandPath(), strings.ReplaceAll(sub.CommandPath(), " ", "-"), sub.Short)
			}
		}
	}
	if cmd.HasExample() {
		fmt.Fprintf(b, "\nExamples:\n\n```\n%s\n```\n", unindent(cmd.Example))
	}
	_ = cmd.Flags().MarkHidden("help")
	if flags := cmd.LocalFlags(); flags.HasAvailableFlags() {
		fmt.Fprintf(b, "\n```\n%s```\n", flags.FlagUsagesWrapped(100))
	}
	for _, sub := range cmd.Commands() {
		if cmd.Name() != "completion" {
			commandPage(b, sub)
		}
	}
}

// unindent takes the two blanks before each line of an example.
func unindent(example string) string {
	lines := strings.Split(strings.Trim(example, "\n"), "\n")
	for i := range lines {
		lines[i] = strings.TrimPrefix(lines[i], "  ")
	}
	return strings.Join(lines, "\n")
}
