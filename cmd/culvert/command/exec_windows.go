package command

import "os"

// passedOn are the signals that the program of exec gets.
var passedOn = []os.Signal{os.Interrupt}

// passOn does nothing: the console has interrupted the program, too.
func passOn(*os.Process, os.Signal) {}

// exitCode returns the exit code of a program.
func exitCode(p *os.ProcessState) int { return p.ExitCode() }
